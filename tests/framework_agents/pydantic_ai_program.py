"""An agent of `pydantic-ai` with a tool, which keeps the first message and the last ones: its context is compacted."""

import json
import os
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import ModelMessage

MAX_MESSAGES = 5


def compact(messages: list[ModelMessage]) -> list[ModelMessage]:
    return messages if len(messages) <= MAX_MESSAGES else [messages[0], *messages[-2:]]


agent = Agent("openai-chat:policy", system_prompt="Add with the tool.", capabilities=[ProcessHistory(compact)])


@agent.tool_plain
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


task = json.loads(Path(os.environ["RLSCALE_TASK"]).read_text())
result = agent.run_sync(task["messages"][-1]["content"])
reward = float(result.output == task["label"])
Path(os.environ["RLSCALE_RESULT"]).write_text(json.dumps({"reward": reward}))
