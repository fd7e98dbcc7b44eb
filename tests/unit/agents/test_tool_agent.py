"""The policy with tools: messages, masks, budgets, wrong calls and failures."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlscale.agents import tool
from rlscale.agents.tool_agent import ToolAgent
from rlscale.agents.tool_pool import Owner, ToolBox, ToolResult
from rlscale.config.groups.agent import AgentConfig, OnToolError
from rlscale.errors import EngineError
from rlscale.images import Image
from rlscale.trajectory import CONTINUED, RESTARTED
from rlscale.types import AGENT, ANSWER, FailureCause, SampleStatus
from tests.scripted_policy import (
    CALL,
    CharacterRenderer,
    ScriptedPool,
    decode,
    encode,
    new_trajectory,
    open_session,
)


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class LocalTools:
    """Tools without processes: results by name."""

    keeps_state = False

    def __init__(self, results: Mapping[str, Callable[[str], ToolResult | Awaitable[ToolResult]]]) -> None:
        self._results, self.calls, self.num_released = results, list[tuple[str, str]](), 0
        self.specs = [{"type": "function", "function": {"name": name}} for name in results]

    async def call(self, name: str, arguments: str, owner: Owner, *, images: Sequence[Image] = ()) -> ToolResult:
        self.calls.append((name, arguments))
        found = self._results[name](arguments)
        return await found if isinstance(found, Awaitable) else found

    async def release(self, owner: Owner) -> None:
        self.num_released += 1

    async def close(self, *, wait: bool) -> None:
        pass


def add_numbers(arguments: str) -> ToolResult:
    return ToolResult(text=str(add.run(arguments)))


def failing(arguments: str) -> ToolResult:
    return ToolResult(text="Error: the tool failed: no route", error="no route (tools.py:3)")


def last_turn(ids: list[int]) -> str:
    """The text since the last message of a user or tool."""
    start = max(i for i, each in enumerate(ids) if each in (3, 5))
    return decode(ids[start + 1 : -1])


def agent(tools: LocalTools, **config: Any) -> ToolAgent:
    settings = AgentConfig(tools=["a:b"], tool_retries=1, **config)
    return ToolAgent(ToolBox([tools], settings), CharacterRenderer(), settings)


async def test_the_policy_calls_tools_until_it_answers() -> None:
    def policy(ids: list[int]) -> str:
        return {"question": '\x06add {"a": 1, "b": 2}\x06add {"a": 3, "b": 4}', "7": "so 10"}[last_turn(ids)]

    tools, pool, trajectory = LocalTools({"add": add_numbers}), ScriptedPool(policy), new_trajectory()
    assert await agent(tools)(trajectory, open_session(pool)) is None
    (sample,) = trajectory.samples()
    assert trajectory.status == SampleStatus.completed
    assert tools.calls == [("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')]
    assert tools.num_released == 1
    # The tokens of the sample are those of the last request and its answer; only sampled ones are trained.
    answer = [*encode("so 10"), 1]
    assert sample.tokens.tolist() == pool.requests[-1] + answer
    first = [CALL, *encode('add {"a": 1, "b": 2}'), CALL, *encode('add {"a": 3, "b": 4}'), 1]
    given = [5, *encode("3"), 5, *encode("7"), 4]
    assert sample.loss_mask.tolist() == [1] * len(first) + [0] * len(given) + [1] * len(answer)
    # The prompt has the tools, which the row's own does not.
    assert decode(sample.prompt.token_ids).startswith("add ")
    assert sample.metadata == {
        "num_forks": 0,
        "num_conversations": 1,
        ANSWER: "so 10",
        AGENT: {"turns": 2, "tool_calls": 2, "tool_rejected": 0, "tool_failed": 0},
    }
    assert all(1 in params.stop_token_ids for params in pool.params)


async def test_calls_of_one_answer_run_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    async def wait(arguments: str) -> ToolResult:
        await both.wait()
        return ToolResult(text=arguments)

    def policy(ids: list[int]) -> str:
        return "\x06wait a\x06wait b" if last_turn(ids) == "question" else last_turn(ids)

    trajectory = new_trajectory()
    async with asyncio.timeout(10):
        assert await agent(LocalTools({"wait": wait}))(trajectory, open_session(ScriptedPool(policy))) is None
    assert trajectory.turns[-1].text == "b"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("\x06mul 1", "Error: there is no tool 'mul'; the tools are add"),
        ("\x06 1", "Error: the tool call cannot be read: a call must have a name"),
    ],
)
async def test_a_wrong_call_is_a_message_to_the_policy(call: str, message: str) -> None:
    seen = []

    def policy(ids: list[int]) -> str:
        seen.append(last_turn(ids))
        return call if len(seen) == 1 else "sorry"

    trajectory = new_trajectory()
    assert await agent(LocalTools({"add": add_numbers}))(trajectory, open_session(ScriptedPool(policy))) is None
    assert seen == ["question", message]
    assert trajectory.metadata[AGENT] == {"turns": 2, "tool_calls": 1, "tool_rejected": 1, "tool_failed": 0}
    assert trajectory.reward is None


@pytest.mark.parametrize(("reaction", "num_calls"), [(OnToolError.retry, 2), (OnToolError.fail, 1)])
async def test_a_failed_tool_fails_the_trajectory(reaction: OnToolError, num_calls: int) -> None:
    tools, trajectory = LocalTools({"get": failing}), new_trajectory()
    session = open_session(ScriptedPool(lambda ids: "\x06get x"))
    failure = await agent(tools, on_tool_error=reaction)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.tool and not failure.cause.is_graded
    calls = f"{num_calls} calls"
    assert failure.message == f"trajectory 0 (prompt row 1): tool get failed ({calls}): no route (tools.py:3)"
    assert len(tools.calls) == num_calls
    assert trajectory.metadata[AGENT]["tool_failed"] == 1
    assert trajectory.reward is None


async def test_a_tool_that_works_again_fails_nothing() -> None:
    tools = LocalTools({"get": lambda _: failing("") if len(tools.calls) == 1 else ToolResult(text="here")})
    trajectory = new_trajectory()

    def policy(ids: list[int]) -> str:
        return "\x06get x" if last_turn(ids) == "question" else "got " + last_turn(ids)

    assert await agent(tools)(trajectory, open_session(ScriptedPool(policy))) is None
    assert trajectory.turns[-1].text == "got here"
    assert trajectory.metadata[AGENT] == {"turns": 2, "tool_calls": 1, "tool_rejected": 0, "tool_failed": 1}


async def test_a_failed_tool_can_be_a_message() -> None:
    tools, trajectory = LocalTools({"get": failing}), new_trajectory()

    def policy(ids: list[int]) -> str:
        return "\x06get x" if last_turn(ids) == "question" else last_turn(ids)

    session = open_session(ScriptedPool(policy))
    assert await agent(tools, on_tool_error=OnToolError.message)(trajectory, session) is None
    # The policy sees no path of a file.
    assert trajectory.turns[-1].text == "Error: the tool failed: no route"


async def test_turns_are_a_budget() -> None:
    trajectory = new_trajectory()
    session = open_session(ScriptedPool(lambda ids: '\x06add {"a": 1, "b": 1}'))
    failure = await agent(LocalTools({"add": add_numbers}), max_turns=3)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.budget and failure.cause.is_graded
    assert failure.message == "trajectory 0 (prompt row 1): agent.max_turns=3 is used up"
    assert (trajectory.status, trajectory.metadata[AGENT]["turns"]) == (SampleStatus.truncated, 3)


async def test_tokens_are_a_budget_of_the_whole_trajectory() -> None:
    trajectory, pool = new_trajectory(), ScriptedPool(lambda ids: '\x06add {"a": 1, "b": 1}')
    failure = await agent(LocalTools({"add": add_numbers}))(trajectory, open_session(pool, max_new_tokens=50))
    assert failure is not None and failure.cause == FailureCause.budget
    assert (trajectory.status, trajectory.num_sampled) == (SampleStatus.truncated, 50)
    assert [params.max_new_tokens for params in pool.params] == [50, 28, 6]


async def test_a_full_context_is_a_budget() -> None:
    trajectory, pool = new_trajectory(), ScriptedPool(lambda ids: '\x06add {"a": 1, "b": 1}')
    session = open_session(pool)
    session = replace(session, params=replace(session.params, max_context_len=40))
    failure = await agent(LocalTools({"add": add_numbers}))(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.budget
    assert trajectory.status == SampleStatus.truncated
    assert len(trajectory.token_ids()) <= 40


async def test_an_attempt_has_a_deadline() -> None:
    async def never(arguments: str) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    trajectory = new_trajectory()
    session = open_session(ScriptedPool(lambda ids: "\x06never x"))
    failure = await agent(LocalTools({"never": never}), timeout_s=0.05)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.controller
    assert failure.message == "trajectory 0 (prompt row 1) took longer than agent.timeout_s=0.05"


async def test_an_engine_that_fails_is_no_fault_of_the_tools() -> None:
    def policy(ids: list[int]) -> str:
        raise EngineError("engine 0 is away")

    failure = await agent(LocalTools({"add": add_numbers}))(new_trajectory(), open_session(ScriptedPool(policy)))
    assert failure is not None and (failure.cause, failure.message) == (FailureCause.model_server, "engine 0 is away")


async def test_the_end_of_a_rollout_ends_a_trajectory_without_a_failure() -> None:
    trajectory, pool = new_trajectory(), ScriptedPool(lambda ids: "\x06get x")
    session = open_session(pool)

    def stop(arguments: str) -> ToolResult:
        session.stopped.set()
        return ToolResult(text="late")

    run = agent(LocalTools({"get": stop}))
    assert await run(trajectory, session) is None
    assert trajectory.status == SampleStatus.aborted
    # The next rollout continues it with the result: the tool is not called again.
    again = ScriptedPool(lambda ids: "done")
    assert await run(trajectory, open_session(again)) is None
    assert (trajectory.status, [turn.text for turn in trajectory.turns]) == (
        SampleStatus.completed,
        ["\x06get x", "", "done"],
    )
    assert decode(again.requests[0]).endswith("late\x04")
    assert trajectory.metadata[CONTINUED] == 1


async def test_a_tool_that_keeps_a_state_is_not_continued_without_it() -> None:
    trajectory = new_trajectory()
    session = open_session(ScriptedPool(lambda ids: "\x06get x"))

    def stop(arguments: str) -> ToolResult:
        session.stopped.set()
        return ToolResult(text="late")

    tools = LocalTools({"get": stop})
    tools.keeps_state = True
    run = agent(tools)
    assert await run(trajectory, session) is None
    assert await run(trajectory, open_session(ScriptedPool(lambda ids: "done"))) is None
    assert [turn.text for turn in trajectory.turns] == ["done"]
    assert trajectory.metadata[RESTARTED] == 1 and CONTINUED not in trajectory.metadata


async def test_a_prompt_without_messages_starts_again_with_its_own_text() -> None:
    trajectory = new_trajectory()
    trajectory.prompt = replace(trajectory.prompt, messages=())
    pool = ScriptedPool(lambda ids: "done")
    for _ in range(2):
        assert await agent(LocalTools({"add": add_numbers}))(trajectory, open_session(pool)) is None
        trajectory.restart()
    assert pool.requests[0] == pool.requests[1]
