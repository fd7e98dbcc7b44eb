"""Runs agents that know a URL: one session of the gateway, and one log, for each attempt.

    admission ──> open session ──> agent ── requests ──> gateway ──> engines
                                     │ result, failure      │
                  trajectory <───────┴── finish session <───┘

Ends of an attempt:

    budget           the gateway refused a request: turns or tokens were used up            graded
    policy           the agent says so, or raises an exception of `agent.policy_errors`;
                     the policy wrote placeholders of images                                graded
    controller       the agent raised, exited with a code, or returned something wrong      starts again
    environment      `agent.timeout_s` has passed, a signal ended it, its server failed     starts again
    model_server     the gateway or the engines failed                                      starts again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_function import FunctionAgent
from rlscale.agents.run_log import AgentLogs, TrajectoryLog
from rlscale.agents.run_task import AgentFailed, AgentResult, AgentSession, AgentTask
from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import (
    EXHAUSTED_BUDGET,
    FAILED_CALL,
    SAMPLED_PLACEHOLDERS,
    AgentGateway,
    SessionAccess,
)
from rlscale.rollout.generate_call import TrajectoryFailed
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.user_generate import BLOCKED, ThreadSession, UserGenerate
from rlscale.trajectory import RESTARTED, Trajectory
from rlscale.types import Failure, FailureCause, SampleStatus

log = logging.getLogger(__name__)

EXTRA_S = 60.0
"""Life of a session after the deadline of its agent."""

DROP_S = 2.0
"""Time in which a session is dropped when the run is cancelled; the gateway ends with the run, too."""


class Agent(Protocol):
    """A way to run an agent: `FunctionAgent`, `CommandAgent` or `RemoteAgent`."""

    async def run(self, task: AgentTask, session: AgentSession, log: TrajectoryLog) -> AgentResult:
        """Runs an agent to its end. Raises AgentFailed; cancelling it ends the agent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLimits:
    """Limits of each trajectory."""

    timeout_s: float
    max_turns: int | None = None  # None: no limit
    max_context_len: int | None = None  # of the model; `rollout.max_context_len` may be less. None: not known


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """One attempt at a trajectory."""

    task: AgentTask
    access: SessionAccess
    log: TrajectoryLog
    result: AgentResult | None = None
    failure: Failure | None = None


class AgentRunner:
    """Generates trajectories by agents; see `group_generator.Generate`. Used from one event loop.

    Invariant: when a call returns or is cancelled, its agent has ended and its session is closed. Only an agent that
    is a function in a thread may continue, without a session.

    Example:
        runner = AgentRunner(gateway, CommandAgent(command=["my-agent"]), limits, logs=logs, admission=admission)
        failure = await runner(trajectory, session)
    """

    def __init__(
        self, gateway: AgentGateway, agent: Agent, limits: AgentLimits, *, logs: AgentLogs, admission: AgentAdmission
    ) -> None:
        self._gateway, self._agent, self._limits, self._logs = gateway, agent, limits, logs
        self._admission = admission
        self._in_thread: UserGenerate | None = None
        if isinstance(agent, FunctionAgent):
            self._in_thread = UserGenerate(
                self._run_in_thread,
                timeout_s=limits.timeout_s,
                timeout_key="agent.timeout_s",
                timeout_cause=FailureCause.environment,
                what="agent",
            )
        self._attempts: dict[str, _Attempt] = {}  # by session

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """Runs an agent, and again if the agent of another trajectory blocked its event loop."""
        if trajectory.status == SampleStatus.aborted:
            trajectory.restart()  # an earlier rollout ended before the agent; it cannot be continued
        async with self._admission.admit() as admitted:
            failure: Failure | None = BLOCKED
            while failure is BLOCKED:
                if session.stopped.is_set():
                    _abort(trajectory)
                    return None
                failure = await self._attempt(trajectory, session)
            admitted.note_end(trajectory, failure)
        return failure

    async def _attempt(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        version = session.versions[0]
        trajectory_log = self._logs.open(trajectory, rid=session.rid, version=version)
        tree, failure = None, None
        try:
            async with self._session(trajectory, session) as access:
                task = await _make_task(trajectory, is_evaluation=session.is_evaluation)
                attempt = _Attempt(task=task, access=access, log=trajectory_log)
                await self._run_until_stopped(attempt, trajectory, session)
                if attempt.result is None and attempt.failure is None:
                    failure = Failure(cause=FailureCause.controller, message="the rollout ended before the agent")
                    trajectory.restart_aborted()
                    _abort(trajectory)
                    return None
                if attempt.failure is BLOCKED:
                    failure = BLOCKED
                    return failure
                tree = await self._gateway.finish(access.id)
            failure = self._merge(trajectory, tree, attempt, session)
        except AgentFailed as error:
            failure = _failure(trajectory, error)
        except EngineError as error:
            failure = Failure(cause=FailureCause.model_server, message=f"{_where(trajectory)} failed: {error}")
        except asyncio.CancelledError:
            failure = Failure(cause=FailureCause.controller, message="the run ended before the agent")
            raise
        finally:
            trajectory_log.close(tree, failure)
        return failure

    @asynccontextmanager
    async def _session(self, trajectory: Trajectory, session: GenerateSession) -> AsyncIterator[SessionAccess]:
        limits = self._limits
        empty, params = replace(trajectory, turns=[], metadata={}), session.params
        if params.max_context_len is None:
            # Only prompts of the data are known to fit; an agent may send longer messages.
            params = replace(params, max_context_len=limits.max_context_len)
        access = await self._gateway.open_session(
            empty, params, lifetime_s=limits.timeout_s + EXTRA_S, max_turns=limits.max_turns
        )
        try:
            yield access
        finally:
            await self._drop(access)

    async def _drop(self, access: SessionAccess) -> None:
        """Closes a session; without effect if it has ended."""
        try:
            async with asyncio.timeout(DROP_S):
                await asyncio.shield(asyncio.ensure_future(self._gateway.drop(access.id)))
        except (EngineError, TimeoutError) as error:
            log.info("session %s was not dropped: %s", access.id, error)

    async def _run_until_stopped(self, attempt: _Attempt, trajectory: Trajectory, session: GenerateSession) -> None:
        """Runs the agent until it ends, its deadline, or the end of the rollout."""
        running = asyncio.ensure_future(self._run(attempt, trajectory, session))
        stopped = asyncio.ensure_future(session.stopped.wait())
        try:
            await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not running.done():
                running.cancel()
            # It ends the processes of the agent first.
            await asyncio.gather(running, return_exceptions=True)
        if not running.cancelled():
            running.result()

    async def _run(self, attempt: _Attempt, trajectory: Trajectory, session: GenerateSession) -> None:
        if self._in_thread is not None:
            await self._run_function(self._in_thread, attempt, trajectory, session)
            return
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                attempt.result = await self._agent.run(
                    attempt.task, AgentSession.from_access(attempt.access), attempt.log
                )
        except AgentFailed as error:
            attempt.failure = _failure(trajectory, error)
        except TimeoutError:
            message = f"it took longer than agent.timeout_s={self._limits.timeout_s:g}"
            attempt.failure = _failure(trajectory, AgentFailed(FailureCause.environment, message))

    async def _run_agent(self, attempt: _Attempt) -> AgentResult:
        return await self._agent.run(attempt.task, AgentSession.from_access(attempt.access), attempt.log)

    async def _run_function(
        self, in_thread: UserGenerate, attempt: _Attempt, trajectory: Trajectory, session: GenerateSession
    ) -> None:
        self._attempts[attempt.access.id] = attempt
        scratch = replace(trajectory, turns=[], metadata={})
        try:
            attempt.failure = await in_thread.attempt(scratch, replace(session, access=attempt.access))
        finally:
            del self._attempts[attempt.access.id]

    async def _run_in_thread(self, scratch: Trajectory, session: ThreadSession) -> None:
        """Calls the function, in the event loop of user code."""
        assert session.access is not None, "set by _run_function"
        attempt = self._attempts[session.access.id]
        try:
            attempt.result = await self._run_agent(attempt)
        except AgentFailed as error:
            raise TrajectoryFailed(_failure(scratch, error)) from error
        scratch.status = SampleStatus.completed

    def _merge(
        self, trajectory: Trajectory, tree: Trajectory, attempt: _Attempt, session: GenerateSession
    ) -> Failure | None:
        """Takes over the turns and the result; returns the failure of the attempt."""
        _check_newest(tree, session)
        failure = _too_old(trajectory, tree, session) or _cause(trajectory, tree, attempt)
        trajectory.turns, trajectory.status = tree.turns, tree.status
        known = {name: value for name, value in trajectory.metadata.items() if name == RESTARTED}
        trajectory.metadata = known | tree.metadata
        if attempt.result is not None:
            trajectory.metadata |= attempt.result.metadata
            trajectory.reward = attempt.result.reward
        is_graded = failure is None or failure.cause.is_graded
        if is_graded and trajectory.status in (SampleStatus.pending, SampleStatus.aborted):
            trajectory.status = SampleStatus.completed if failure is None else SampleStatus.truncated
        return failure


async def _make_task(trajectory: Trajectory, *, is_evaluation: bool) -> AgentTask:
    make = partial(AgentTask.from_trajectory, trajectory, is_evaluation=is_evaluation)
    try:
        # In a thread: images are files.
        return await asyncio.to_thread(make) if trajectory.prompt.images else make()
    except (OSError, ValueError) as error:
        raise AgentFailed(FailureCause.controller, f"an image of its row cannot be read: {error}") from error


def _cause(trajectory: Trajectory, tree: Trajectory, attempt: _Attempt) -> Failure | None:
    """The failure of an attempt: a used up budget first, because the agent fails by the refused request."""
    if budget := tree.metadata.get(EXHAUSTED_BUDGET):
        return Failure(cause=FailureCause.budget, message=f"{_where(trajectory)} has used all of its {budget}")
    if wrote := tree.metadata.get(SAMPLED_PLACEHOLDERS):
        return Failure(cause=FailureCause.policy, message=f"{_where(trajectory)}: {wrote}")
    # Whatever the agent made of it: a failure of an engine is no reward.
    if (call := tree.metadata.get(FAILED_CALL)) and not _is_late(attempt):
        return _failure(trajectory, AgentFailed(FailureCause.model_server, f"its last request failed: {call}"))
    if attempt.failure is not None:
        return attempt.failure
    assert attempt.result is not None, "an agent has a result or a failure"
    if attempt.result.failure is not None:
        return attempt.result.failure
    if not any(turn.sampled for turn in tree.turns):
        message = "it ended without a request that was answered; its client must use base_url and api_key"
        return _failure(trajectory, AgentFailed(FailureCause.controller, message))
    return None


def _is_late(attempt: _Attempt) -> bool:
    return attempt.failure is not None and attempt.failure.cause == FailureCause.environment


def _check_newest(tree: Trajectory, session: GenerateSession) -> None:
    """Raises an error if weights generated a token that the engines cannot have yet."""
    newest = session.versions[1]
    wrong = [each for each in tree.versions if newest is not None and each > newest]
    if wrong:
        found = f"tokens of weight version {wrong[0]} for trajectory {tree.id}"
        raise WeightSyncError(f"the gateway returned {found}, expected version {newest} or an older one")


def _too_old(trajectory: Trajectory, tree: Trajectory, session: GenerateSession) -> Failure | None:
    """The failure of an attempt that an engine answered after its restart, before it had the run's weights."""
    wrong = [each for each in tree.versions if each < session.versions[0]]
    if not wrong:
        return None
    message = f"an engine answered with weight version {wrong[0]}, expected {session.versions[0]} or a newer one"
    return _failure(trajectory, AgentFailed(FailureCause.model_server, message))


def _abort(trajectory: Trajectory) -> None:
    """Leaves a trajectory to a later rollout, which begins it again."""
    trajectory.restart()
    trajectory.status = SampleStatus.aborted


def _where(trajectory: Trajectory) -> str:
    return f"agent of trajectory {trajectory.id} (prompt row {trajectory.prompt.index + 1})"


def _failure(trajectory: Trajectory, error: AgentFailed) -> Failure:
    return Failure(cause=error.cause, message=f"{_where(trajectory)} failed: {error.message}")
