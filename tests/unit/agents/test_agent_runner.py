"""Functions in threads behind a gateway without engines. Commands and processes: tests/ranks/agents."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from rlscale.agents.agent_runner import AgentLimits, AgentRunner
from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_function import FunctionAgent
from rlscale.agents.run_log import AgentLogs
from rlscale.agents.run_task import AgentSession, AgentTask
from rlscale.errors import SandboxError, WeightSyncError
from rlscale.images import Image
from rlscale.protocols import SAMPLED_PLACEHOLDERS
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import FailureCause, Prompt, SampleStatus, SamplingParams
from tests.agent_gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway().start()
    yield gateway
    gateway.stop()


@pytest.fixture
def session() -> GenerateSession:
    pool = cast(EnginePool, None)  # the gateway has the engines
    return GenerateSession(params=SamplingParams(max_new_tokens=50), rid="train-2-8", pool=pool, versions=(0, 0))


@pytest.fixture
def trajectory() -> Trajectory:
    prompt = Prompt(index=3, text="2+2=", token_ids=(1, 2), label="4", metadata={"level": 1})
    return Trajectory(id=8, group_index=2, prompt=prompt, seed=5)


Run = Callable[..., AgentRunner]


@pytest.fixture
def runner(gateway: FakeGateway, tmp_path: Path) -> Run:
    def build(
        function: Callable[..., Any],
        *,
        timeout_s: float = 30.0,
        max_turns: int | None = None,
        admission: AgentAdmission | None = None,
    ) -> AgentRunner:
        return AgentRunner(
            gateway,
            FunctionAgent(function, policy_errors=["TurnsUsedUp"]),
            AgentLimits(timeout_s=timeout_s, max_turns=max_turns),
            logs=AgentLogs(tmp_path, keep=100, max_bytes=10_000),
            admission=admission or AgentAdmission(8),
        )

    return build


async def chat(session: AgentSession, messages: list[dict[str, Any]]) -> str:
    body = {"model": session.model, "messages": messages}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with (
        aiohttp.ClientSession(base_url=f"{session.base_url}/", headers=headers) as http,
        http.post("chat/completions", json=body, raise_for_status=True) as response,
    ):
        return cast(str, (await response.json())["choices"][0]["message"]["content"])


async def one_turn(task: AgentTask, session: AgentSession) -> float:
    return float(await chat(session, task.messages) == task.label)


async def test_the_trajectory_has_the_turns_and_the_reward_of_the_agent(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession, tmp_path: Path
) -> None:
    async def two_turns(task: AgentTask, session: AgentSession) -> dict[str, Any]:
        first = await chat(session, task.messages)
        more = [*task.messages, {"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        return {"reward": float(await chat(session, more) == task.label), "metadata": {"num_tools": 1}}

    assert await runner(two_turns)(trajectory, session) is None
    assert [(turn.sampled, turn.text) for turn in trajectory.turns] == [(True, "4"), (False, "again"), (True, "4")]
    assert (trajectory.reward, trajectory.status) == (1.0, SampleStatus.completed)
    assert trajectory.metadata["num_tools"] == 1
    assert not gateway.open and len(gateway.ended) == 1
    log = (tmp_path / "0" / "8.log").read_text()
    assert "turn 2 (sampled, 1 tokens, after turn 1): '4'" in log


@pytest.mark.parametrize("is_async", [True, False])
async def test_without_a_reward_the_run_grades(
    runner: Run, trajectory: Trajectory, session: GenerateSession, is_async: bool
) -> None:
    async def coroutine(task: AgentTask, session: AgentSession) -> None:
        await chat(session, task.messages)

    def plain(task: AgentTask, session: AgentSession) -> None:
        asyncio.run(chat(session, task.messages))

    assert await runner(coroutine if is_async else plain)(trajectory, session) is None
    assert trajectory.reward is None and trajectory.status == SampleStatus.completed


async def test_placeholders_that_the_policy_wrote_are_its_failure(
    runner: Run, trajectory: Trajectory, session: GenerateSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FakeGateway.finish

    async def with_placeholders(gateway: FakeGateway, session_id: str) -> Trajectory:
        tree = await finish(gateway, session_id)
        tree.metadata[SAMPLED_PLACEHOLDERS] = "its answers have 2 placeholders of images, which it wrote"
        return tree

    monkeypatch.setattr(FakeGateway, "finish", with_placeholders)
    failure = await runner(one_turn)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.policy and "placeholders" in failure.message


async def test_an_image_that_is_gone_fails_its_trajectory(
    runner: Run, trajectory: Trajectory, session: GenerateSession, tmp_path: Path
) -> None:
    image = Image(uri=str(tmp_path / "gone.png"), digest="0", grid=(1, 2, 2), token=5, num_tokens=1)
    trajectory.prompt = replace(trajectory.prompt, images=(image,))
    failure = await runner(one_turn)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.controller
    assert "an image of its row cannot be read" in failure.message and "gone.png" in failure.message


async def test_an_exception_is_a_failure_of_the_controller_and_its_turns_are_in_the_log(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession, tmp_path: Path
) -> None:
    async def agent(task: AgentTask, session: AgentSession) -> None:
        await chat(session, task.messages)
        raise KeyError("no such tool")

    failure = await runner(agent)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.controller
    assert failure.message.startswith("agent of trajectory 8 (prompt row 4) failed: KeyError: 'no such tool' at ")
    log = (tmp_path / "0" / "8.log").read_text()
    assert "failed (controller)" in log and "turn 0 (sampled" in log and not gateway.open


@pytest.mark.parametrize(("ends", "predicted"), [("well", 3), ("badly", 500), ("aborted", 500)])
async def test_only_whole_attempts_predict_the_cache_of_later_ones(
    runner: Run, trajectory: Trajectory, session: GenerateSession, ends: str, predicted: int
) -> None:
    asked = threading.Event()

    async def agent(task: AgentTask, session: AgentSession) -> float:
        await chat(session, task.messages)
        asked.set()
        if ends == "aborted":
            await asyncio.Event().wait()
        if ends == "badly":
            raise KeyError("no such tool")
        return 1.0

    admission = AgentAdmission(8, cache_tokens=1000, first_tokens=500)
    running = asyncio.ensure_future(runner(agent, admission=admission)(trajectory, session))
    await asyncio.to_thread(asked.wait)
    if ends == "aborted":
        session.stopped.set()
    await running
    assert admission.predicted_tokens == predicted and admission.num_running == 0


class TurnsUsedUp(Exception): ...


async def test_a_sandbox_that_fails_is_the_cause(runner: Run, trajectory: Trajectory, session: GenerateSession) -> None:
    async def agent(task: AgentTask, agent_session: AgentSession) -> None:
        raise SandboxError("a sandbox ended")

    failure = await runner(agent)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.sandbox and "a sandbox ended" in failure.message


async def test_exceptions_that_are_the_fault_of_the_policy_are_graded(
    runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    async def agent(task: AgentTask, session: AgentSession) -> None:
        await chat(session, task.messages)
        raise TurnsUsedUp("12 turns")

    failure = await runner(agent)(trajectory, session)
    assert failure is not None and (failure.cause, failure.message) == (FailureCause.policy, "TurnsUsedUp: 12 turns")
    assert len(trajectory.turns) == 1 and trajectory.status == SampleStatus.completed


async def test_a_used_up_budget_is_graded_whatever_the_agent_does_then(
    runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    async def endless(task: AgentTask, session: AgentSession) -> None:
        while True:
            await chat(session, task.messages)  # raises once the gateway refuses

    failure = await runner(endless, max_turns=3)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.budget
    assert sum(turn.sampled for turn in trajectory.turns) == 3


@pytest.mark.parametrize(("num_failing", "cause"), [(1, None), (2, FailureCause.model_server)])
@pytest.mark.slow
async def test_a_failure_of_the_engines_is_no_reward(
    gateway: FakeGateway,
    runner: Run,
    trajectory: Trajectory,
    session: GenerateSession,
    num_failing: int,
    cause: FailureCause | None,
) -> None:
    """An agent that hides it is graded only if a later request was answered."""

    async def careless(task: AgentTask, session: AgentSession) -> float:
        await chat(session, task.messages)
        gateway.num_failing = num_failing
        for _ in range(2):
            with suppress(aiohttp.ClientResponseError):
                await chat(session, task.messages)
        return 0.0

    failure = await runner(careless)(trajectory, session)
    assert (failure and failure.cause) == cause
    if failure is not None:
        assert "its last request failed: EngineError: engine 0 must answer" in failure.message


@pytest.mark.slow
async def test_a_late_agent_is_a_failure_of_the_environment(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    async def hanging(task: AgentTask, session: AgentSession) -> None:
        await chat(session, task.messages)
        await asyncio.Event().wait()

    failure = await runner(hanging, timeout_s=0.5)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.environment
    assert failure.message.endswith("took longer than agent.timeout_s=0.5") and not gateway.open


@pytest.mark.parametrize(("own", "expected"), [(None, 2048), (512, 512)])
async def test_conversations_fit_the_model(
    gateway: FakeGateway,
    trajectory: Trajectory,
    session: GenerateSession,
    tmp_path: Path,
    own: int | None,
    expected: int,
) -> None:
    runner = AgentRunner(
        gateway,
        FunctionAgent(one_turn),
        AgentLimits(timeout_s=30.0, max_context_len=2048),
        logs=AgentLogs(tmp_path, keep=1, max_bytes=1000),
        admission=AgentAdmission(1),
    )
    params = replace(session.params, max_context_len=own)
    assert await runner(trajectory, replace(session, params=params)) is None
    assert gateway.ended[0].params.max_context_len == expected


async def test_an_agent_without_a_request_is_a_failure(
    runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    failure = await runner(lambda task, session: 1.0)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.controller
    assert "without a request that was answered" in failure.message


@pytest.mark.slow
async def test_a_blocked_event_loop_fails_one_agent_and_the_others_start_again_in_a_new_session(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    released, both = threading.Event(), threading.Barrier(2)

    async def agent(task: AgentTask, session: AgentSession) -> float:
        if task.id == 9 and not released.is_set():
            await asyncio.to_thread(both.wait)
            released.wait(20)  # blocks the loop
        elif task.id == 8 and both.n_waiting:
            await asyncio.to_thread(both.wait)
        return await one_turn(task, session)

    blocking = Trajectory(id=9, group_index=2, prompt=trajectory.prompt, seed=6)
    run = runner(agent, timeout_s=3.0)
    first = asyncio.ensure_future(run(blocking, session))
    while not both.n_waiting:
        await asyncio.sleep(0.01)
    second = await run(trajectory, session)
    failure = await first
    released.set()
    assert failure is not None and failure.cause == FailureCause.environment
    assert second is None and [turn.text for turn in trajectory.turns] == ["4"]


async def test_an_agent_of_an_ended_rollout_is_left_to_the_next_one(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    began = threading.Event()

    async def hanging(task: AgentTask, session: AgentSession) -> float:
        reward = await one_turn(task, session)
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()
        return reward

    run = runner(hanging)
    running = asyncio.ensure_future(run(trajectory, session))
    await asyncio.to_thread(began.wait)
    session.stopped.set()
    assert await running is None
    assert trajectory.status == SampleStatus.aborted and not trajectory.turns and not gateway.open
    session.stopped.clear()
    assert await run(trajectory, session) is None
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


async def test_cancelling_closes_the_session(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    began = threading.Event()

    async def hanging(task: AgentTask, session: AgentSession) -> None:
        began.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(runner(hanging)(trajectory, session))
    await asyncio.to_thread(began.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not gateway.open and gateway.num_dropped == 1


async def test_tokens_of_other_weights_end_the_run(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    gateway.version = 4
    with pytest.raises(WeightSyncError, match="weight version 4 for trajectory 8, expected version 0 or an older one"):
        await runner(one_turn)(trajectory, session)
    assert not gateway.open
    # An engine that has restarted may answer before it gets the weights: the trajectory starts again.
    later = replace(session, versions=(5, 5))
    failure = await runner(one_turn)(trajectory, later)
    assert failure is not None and failure.cause == FailureCause.model_server
    assert failure.message.endswith("an engine answered with weight version 4, expected 5 or a newer one")


async def test_a_gateway_that_forgot_the_session_is_a_failure_of_the_model_server(
    gateway: FakeGateway, runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    async def agent(task: AgentTask, session: AgentSession) -> None:
        await chat(session, task.messages)
        gateway.open.clear()

    failure = await runner(agent)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.model_server
