"""Two agents that cooperate: the speaker sees a number and sends three letters, the listener has to name the number.

    number ──> speaker ── three letters ──> listener ──> number: the reward of both compares it with the label

The policy is both of them, each in a conversation that the other one does not see: two paths of one trajectory.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from aiohttp import ClientSession

from rlscale.agents.run_task import AgentSession, AgentTask

MAX_LETTERS = 3
LISTENER = "Your partner sent {letters}. Which number?"


async def play(task: AgentTask, session: AgentSession) -> dict[str, Any]:
    """Plays one round: the messages of the row are for the speaker. The run's reward grades the last answer."""
    # Everything but letters is lost, so that the number cannot be sent as it is.
    letters = re.sub("[^a-z]", "", (await _ask(session, task.messages)).lower())[:MAX_LETTERS]
    question = {"role": "user", "content": LISTENER.format(letters=letters)}
    await _ask(session, [question])
    return {"metadata": {"letters": letters}}


async def _ask(session: AgentSession, messages: Sequence[Mapping[str, Any]]) -> str:
    """The answer of the policy; messages that continue no earlier ones begin a conversation."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with (
        ClientSession(f"{session.base_url}/", headers=headers) as client,
        # An error ends the attempt; a budget that is used up is graded all the same.
        client.post("chat/completions", json={"model": session.model, "messages": messages}) as response,
    ):
        response.raise_for_status()
        answer = await response.json()
        return cast(str, answer["choices"][0]["message"]["content"] or "")
