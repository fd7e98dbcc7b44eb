"""Trajectories of agents for synthetic run folders. Contains no tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Prompt, SampleStatus

ATTACK = "<img src=x onerror=\"document.title='taken'\">"
SYSTEM = {"role": "system", "content": "Use the tools. Answer with a number."}
QUESTION = {"role": "user", "content": f"What is 17 * 23 + 4? {ATTACK}"}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "call_0", "type": "function", "function": function}


class Maker:
    """Grows one trajectory; each answer has 12 tokens and takes a second."""

    def __init__(self, number: int, *messages: Mapping[str, Any]) -> None:
        prompt = Prompt(
            index=number, text="rendered", token_ids=(1, 2, 3), label="395", messages=tuple(map(dict, messages))
        )
        self.trajectory = Trajectory(id=number, group_index=number // 4, prompt=prompt, seed=0)
        self._clock = 1000.0

    def answer(
        self, content: str, *calls: dict[str, Any], parent: int | None = -1, version: int = 3, **more: Any
    ) -> int:
        message = {"role": "assistant", "content": content, **more, **({"tool_calls": list(calls)} if calls else {})}
        number = self.trajectory.extend(
            [4] * 12, logprobs=[-0.1] * 12, weight_versions=[version] * 12, sampled=True, parent=parent
        )
        turn = self.trajectory.turns[number]
        turn.messages, turn.interval_s = (message,), (self._clock, self._clock + 1.0)
        self._clock += 1.4
        return number

    def give(self, *messages: dict[str, Any], parent: int | None = -1) -> int:
        number = self.trajectory.extend([5] * 20, parent=parent)
        self.trajectory.turns[number].messages = messages
        return number

    def own_prompt(self, *messages: dict[str, Any]) -> int:
        number = self.trajectory.extend([], parent=None)
        turn = self.trajectory.turns[number]
        turn.prompt = Prompt(index=self.trajectory.prompt.index, text="", token_ids=(7, 8, 9), label="395")
        turn.messages = messages
        return number

    def end(self, reward: float | None, status: SampleStatus = SampleStatus.completed) -> Trajectory:
        self.trajectory.status, self.trajectory.reward = status, reward
        return self.trajectory


def tool_trajectory(number: int) -> Trajectory:
    """Two calls at once, their results, a second call whose arguments are no JSON, and an answer."""
    made = Maker(number, SYSTEM, QUESTION)
    made.answer(
        "", call("multiply", a=17, b=23), call("search", query="sum of " * 20), reasoning_content="First 17 * 23."
    )
    made.give(
        {"role": "tool", "name": "multiply", "content": "391"}, {"role": "tool", "name": "search", "content": ATTACK}
    )
    broken = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 391, "b": '}}
    made.answer("Now add 4.", broken, version=4)
    made.give({"role": "tool", "name": "add", "content": "Error: the arguments of add must be a JSON object"})
    made.answer("The answer is **395**.", version=4)
    made.trajectory.metadata["agent"] = {"turns": 3, "tool_calls": 3}
    made.trajectory.metadata["rewards"] = {"score": 1.0, "acc": True, "pred": "395", "aux": float("nan")}
    return made.end(1.0)


def tree_trajectory(number: int) -> Trajectory:
    """A branch after the first answer, and a sub-agent with its own prompt, whose answer used up the turns."""
    made = Maker(number, QUESTION)
    first = made.answer("I will ask an assistant.")
    given = made.give({"role": "user", "content": "Go ahead."}, parent=first)
    made.answer("It is 395.", parent=given)
    made.answer("It is 396.", parent=given)
    own = made.own_prompt({"role": "system", "content": "You add numbers."}, {"role": "user", "content": "391 + 4"})
    made.answer("395", parent=own)
    made.trajectory.failure = Failure(cause=FailureCause.budget, message="agent.max_turns=4 is used up")
    return made.end(0.5, SampleStatus.truncated)


def failed_trajectory(number: int) -> Trajectory:
    """An attempt whose sandbox ended."""
    made = Maker(number, QUESTION)
    made.answer("", call("python", code="import os\nwhile True:\n    os.fork()"))
    made.trajectory.failure = Failure(cause=FailureCause.sandbox, message=f"a sandbox ended {ATTACK}")
    return made.end(None, SampleStatus.pending)
