"""An agent of `openai-agents`: a triage agent hands off to one with a tool, or calls it as a tool."""

import json
import os
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


adder = Agent(name="adder", instructions="Add with the tool.", tools=[add], model="policy")
helper = Agent(name="helper", instructions="Help.", model="policy")
triage = Agent(
    name="triage",
    instructions="Hand off.",
    handoffs=[adder],
    tools=[helper.as_tool(tool_name="ask", tool_description="Asks the helper.")],
    model="policy",
)

task = json.loads(Path(os.environ["RLSCALE_TASK"]).read_text())
result = Runner.run_sync(triage, task["messages"], max_turns=8)
reward = float(str(result.final_output) == task["label"])
Path(os.environ["RLSCALE_RESULT"]).write_text(json.dumps({"reward": reward}))
