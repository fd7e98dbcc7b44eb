"""Tools, an environment and agents of the run of mixed agents; processes load them by their paths."""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from rlscale.agents import StepResult, tool
from rlscale.agents.environment import Action, Task
from rlscale.agents.run_task import AgentSession, AgentTask

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


class Game:
    """Ends after one to three actions."""

    def reset(self, task: Task) -> str:
        self.left = 1 + task.seed % 3
        return f"{self.left} to go"

    async def step(self, action: Action) -> StepResult:
        self.left -= 1
        return StepResult(messages=f"{self.left} to go", reward=len(action.text) % 3 / 2, done=not self.left)


_clients: dict[asyncio.AbstractEventLoop, AsyncOpenAI] = {}


def client_of(session: AgentSession) -> AsyncOpenAI:
    """A client with the key of the session; all of an event loop share their connections."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0, timeout=300)
    return _clients[loop].with_options(api_key=session.api_key)


async def chat(client: AsyncOpenAI, messages: list[Any], **options: Any) -> list[Any]:
    """The messages with the first answer; as they are if a budget is used up."""
    try:
        answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    except BadRequestError as error:
        if error.code not in ("budget_exhausted", "context_length_exceeded"):
            raise
        return messages
    return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


async def tool_loop(task: AgentTask, session: AgentSession) -> float:
    """A loop over OpenAI's client with a tool that this agent answers itself."""
    client, messages = client_of(session), list(task.messages)
    for _ in range(4):
        messages = await chat(client, messages, tools=[TOOL])
        calls = messages[-1].get("tool_calls") or []
        if not calls:
            break
        messages += [{"role": "tool", "tool_call_id": each["id"], "content": "7"} for each in calls]
    return float(len(messages) % 2)


async def branches(task: AgentTask, session: AgentSession) -> float:
    """Several answers at once, concurrent calls of one history, a sub-agent, and a history that is compacted."""
    client, messages = client_of(session), list(task.messages)
    # All answers together fit the budget, so that none of the concurrent ones is cut after it was sampled.
    short = {"max_tokens": 12}
    first = await chat(client, messages, n=2, **short)
    user = [{"role": "user", "content": text} for text in ("check it", "shorter", "sum up")]
    helper = [{"role": "system", "content": "You help."}, user[0]]
    checked, _, helped = await asyncio.gather(
        *[chat(client, each, **short) for each in ([*first, user[0]], [*first, user[1]], helper)]
    )
    await chat(client, [*messages, user[2], *helped[2:], user[1]], **short)
    return float(len(json.dumps(checked)) % 2)


COMMAND = """
import json, os, urllib.error, urllib.request

task, url = json.load(open(os.environ["RLSCALE_TASK"])), os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = task["messages"]
for turn in range(1 + task["id"] % 3):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as response:
            messages = [*messages, json.load(response)["choices"][0]["message"], {"role": "user", "content": "1+1="}]
    except urllib.error.HTTPError as error:
        assert error.code == 400, error.read()
        break
json.dump({"reward": float(len(messages) % 2)}, open(os.environ["RLSCALE_RESULT"], "w"))
"""
"""A program without any library, for the agent in processes."""
