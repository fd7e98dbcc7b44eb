"""A calculator agent of `openai-agents`. It knows nothing of rlscale: its model is behind any OpenAI-compatible URL.

    OPENAI_BASE_URL=http://... OPENAI_API_KEY=... python -m rlscale.examples.calculator_agent task.json

`task.json` is an object with `messages`. The program prints the answer.
"""

import json
import re
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def calculate(expression: str) -> str:
    """One operation on two integers, e.g. 12*34.

    Args:
        expression: two integers and +, - or * between them.
    """
    found = re.fullmatch(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*", expression)
    if found is None:
        return "error: write two integers and +, - or * between them"
    left, right = int(found[1]), int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[found[2]])


AGENT = Agent(name="calculator", tools=[calculate], model="policy")


def main() -> None:
    # Its default is the Responses API, whose traces it sends to OpenAI.
    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(f"{Runner.run_sync(AGENT, task['messages']).final_output}\n")


if __name__ == "__main__":
    main()
