"""An agent of `smolagents` with a tool. It writes earlier calls as text, so that each step has its own prompt."""

import json
import os
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """The sum.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
task = json.loads(Path(os.environ["RLSCALE_TASK"]).read_text())
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=1)
reward = float(str(agent.run(task["messages"][-1]["content"])) == task["label"])
Path(os.environ["RLSCALE_RESULT"]).write_text(json.dumps({"reward": reward}))
