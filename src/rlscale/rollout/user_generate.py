"""The user's generate function, kept apart from the event loop that drives the run.

    event loop of the run                       thread "user generate" with a second loop
      call(trajectory) ──────────────────────>    generate(trajectory, session)
      request <──────────────────────────────     await session.generate(...)
      answer  ──────────────────────────────>
      failure or None <──────────────────────

A function that blocks its loop delays only other trajectories of user code. At its deadline it is a failure, and the
others start again in another thread; its own further attempts have a thread each.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlscale.errors import WeightSyncError
from rlscale.rewards import JudgeClient
from rlscale.rewards.judge_client import JudgeError
from rlscale.rollout.generate_call import UserFunction, call_generate, describe_failure
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.limited_session import LimitedSession
from rlscale.rollout.loop_thread import LoopThread
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Generation, SamplingParams, WeightVersion

log = logging.getLogger(__name__)
T = TypeVar("T")

_TASK = "generate of trajectory "
"""Prefix of the names of tasks, followed by the id of their trajectory."""

BLOCKED = Failure(cause=FailureCause.controller, message="another trajectory blocks the event loop")
"""Result of an attempt that does not count."""


class UserGenerate:
    """Calls a user's generate function for one trajectory; see `group_generator.Generate`.

    Args:
        function: `async def generate(trajectory, session) -> None`, or a plain function, which gets its own thread.
        timeout_s: deadline of one trajectory.
        timeout_key: the key of that deadline, for messages.
        timeout_cause: of the failure after that time.
        what: kind of the function, for messages.
        max_turns: answers of engines in one trajectory; None: no limit.
    """

    def __init__(
        self,
        function: UserFunction,
        *,
        timeout_s: float,
        timeout_key: str = "sampling.generate_timeout_s",
        timeout_cause: FailureCause = FailureCause.controller,
        what: str = "generate",
        max_turns: int | None = None,
    ) -> None:
        self._function, self._timeout_s, self._timeout_key, self._what = function, timeout_s, timeout_key, what
        self._timeout_cause, self._max_turns = timeout_cause, max_turns
        self._thread: LoopThread | None = None
        self._blockers: set[int] = set()  # trajectories that blocked a loop: each gets its own

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """Returns what went wrong: an engine's error as `model_server`, anything else as `controller`."""
        while True:
            failure = await self.attempt(trajectory, session)
            if failure is not BLOCKED:
                return failure
            log.info("trajectory %d starts again: another one blocks its event loop", trajectory.id)

    async def attempt(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """As a call; `BLOCKED` if another trajectory blocks the event loop of this one, which starts again."""
        thread, name = self._thread_of(trajectory), f"{_TASK}{trajectory.id}"
        own = replace(trajectory, turns=deepcopy(trajectory.turns), metadata=dict(trajectory.metadata))
        inner = ThreadSession(session, asyncio.get_running_loop(), trajectory=own, max_turns=self._max_turns)
        call = call_generate(self._function, own, inner, what=self._what)
        future = asyncio.wrap_future(thread.submit(call, name=name))
        try:
            await self._wait(future, thread, name)
        finally:
            future.cancel()
            if thread.lost.is_set() and self._thread is thread:
                self._thread = None
            thread.leave(is_used=self._thread is thread)
        if future.cancelled():
            if thread.lost.is_set() and thread.blocker != name and (thread.blocker or "").startswith(_TASK):
                return BLOCKED
            if thread.lost.is_set():
                self._blockers.add(trajectory.id)
            late = f"took longer than {self._timeout_key}={self._timeout_s:g}"
            return replace(describe_failure(trajectory, late, what=self._what), cause=self._timeout_cause)
        failure = future.result()
        if isinstance(failure, WeightSyncError):
            raise failure
        # The function has ended. One that has not may still write to its copy.
        for each in ("turns", "metadata", "status", "reward"):
            setattr(trajectory, each, getattr(own, each))
        return failure

    def _thread_of(self, trajectory: Trajectory) -> LoopThread:
        if trajectory.id in self._blockers:
            return LoopThread()
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread

    async def _wait(self, future: "asyncio.Future[Any]", thread: LoopThread, name: str) -> None:
        """Returns when the call has ended, at its deadline, or when another one blocks the thread."""
        loop = asyncio.get_running_loop()
        end, lost = loop.time() + self._timeout_s, asyncio.ensure_future(thread.lost.wait())
        try:
            while not future.done() and (left_s := end - loop.time()) > 0:
                waited = [future] if lost.done() else [future, lost]
                await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if lost.done() and thread.blocker != name:
                    return
            if not future.done():
                await thread.check()
        finally:
            lost.cancel()


class ThreadSession:
    """A `GenerateSession` for another thread: its requests run in the event loop of the run.

    Args:
        trajectory, max_turns: as of `LimitedSession`.
    """

    def __init__(
        self,
        session: GenerateSession,
        loop: asyncio.AbstractEventLoop,
        *,
        trajectory: Trajectory | None = None,
        max_turns: int | None = None,
    ) -> None:
        self._session, self._loop = session, loop
        self._limited = LimitedSession(session, trajectory, max_turns=max_turns)
        self.params, self.config, self.tokenizer = session.params, session.config, session.tokenizer
        self.is_evaluation, self.access = session.is_evaluation, session.access

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """See GenerateSession. Requests may be concurrent, from any event loop.

        The answer is empty, with the finish reason `length`, if the turns before it used up the tokens of a trajectory.
        """
        call = self._limited.generate(token_ids, params)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def model(self, name: str) -> "ThreadModel":
        """A further model of `sglang.config`, whose weights stay as they are.

        Raises:
            JudgeError: there is no model of this name.
        """
        models = self._session.pool.models
        if models is None:
            raise JudgeError(f"model must name a frozen model of sglang.config (none), got {name}")
        return ThreadModel(models.model(name), self._loop)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first engine."""
        return engine_address_of(self._session)

    @property
    def gateway(self) -> Any:
        """See GenerateSession."""
        return self._session.gateway

    @property
    def oldest_version(self) -> WeightVersion:
        """Version of the oldest weights that the engines may have."""
        return self._session.versions[0]

    @property
    def is_stopped(self) -> bool:
        """Whether the rollout has ended: answers are aborted from now on."""
        return self._session.stopped.is_set()


def engine_address_of(session: GenerateSession) -> tuple[str, int]:
    """Host and port of the first engine."""
    parts = urlsplit(session.pool.present[0].address.url)
    return parts.hostname or "127.0.0.1", parts.port or 80


class ThreadModel:
    """A client of a frozen model for another thread: its requests run in the event loop of the run."""

    def __init__(self, client: JudgeClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    async def generate(self, prompt: str | Sequence[Mapping[str, str]], **params: Any) -> str:
        """See JudgeClient."""
        return await self._call(self._client.generate(prompt, **params))

    async def score(self, texts: Sequence[str]) -> list[float]:
        """See JudgeClient."""
        return await self._call(self._client.score(texts))

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """See JudgeClient."""
        return await self._call(self._client.request(path, body))

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
