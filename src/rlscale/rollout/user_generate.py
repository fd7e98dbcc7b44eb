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
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlscale.errors import EngineError, SandboxError, WeightSyncError
from rlscale.plugins.daemon_call import call_in_daemon, exit_fork
from rlscale.plugins.user_hook import code_place, is_finite, shown
from rlscale.rewards import JudgeClient
from rlscale.rewards.judge_client import JudgeError
from rlscale.rollout.generate_session import FULL, GenerateSession
from rlscale.rollout.loop_thread import LoopThread
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Generation, SampleStatus, SamplingParams, WeightVersion

log = logging.getLogger(__name__)
T = TypeVar("T")

_TASK = "generate of trajectory "
"""Prefix of the names of tasks, followed by the id of their trajectory."""

BLOCKED = Failure(cause=FailureCause.controller, message="another trajectory blocks the event loop")
"""Result of an attempt that does not count."""

UserFunction = Callable[[Trajectory, Any], Awaitable[None] | None]


class TrajectoryFailed(Exception):
    """Raised by a generate function to return a failure with its cause."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class UserGenerate:
    """Calls a user's generate function for one trajectory; see `group_generator.Generate`.

    Args:
        function: `async def generate(trajectory, session) -> None`, or a plain function, which gets its own thread.
        timeout_s: deadline of one trajectory.
        timeout_key: the key of that deadline, for messages.
        timeout_cause: of the failure after that time.
        what: kind of the function, for messages.
    """

    def __init__(
        self,
        function: UserFunction,
        *,
        timeout_s: float,
        timeout_key: str = "sampling.generate_timeout_s",
        timeout_cause: FailureCause = FailureCause.controller,
        what: str = "generate",
    ) -> None:
        self._function, self._timeout_s, self._timeout_key, self._what = function, timeout_s, timeout_key, what
        self._timeout_cause = timeout_cause
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
        inner = ThreadSession(session, asyncio.get_running_loop(), num_sampled=own.num_sampled)
        future = asyncio.wrap_future(thread.submit(self._run(own, inner), name=name))
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
            late = self._failure(trajectory, f"took longer than {self._timeout_key}={self._timeout_s:g}")
            return replace(late, cause=self._timeout_cause)
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

    async def _call(self, trajectory: Trajectory, session: "ThreadSession") -> None:
        call = getattr(self._function, "__call__", self._function)  # noqa: B004  # an object may have an async one
        if not (iscoroutinefunction(self._function) or iscoroutinefunction(call)):
            await call_in_daemon(self._function, trajectory, session)
        elif (found := self._function(trajectory, session)) is not None and isawaitable(found):
            await found

    async def _run(self, trajectory: Trajectory, session: "ThreadSession") -> Failure | WeightSyncError | None:
        pid = os.getpid()
        try:
            await self._call(trajectory, session)
        except WeightSyncError as error:
            return error
        except EngineError as error:
            return Failure(cause=FailureCause.model_server, message=str(error))
        except TrajectoryFailed as error:
            return error.failure
        except SandboxError as error:
            return Failure(cause=FailureCause.sandbox, message=str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code, `sys.exit` included: a failure of this trajectory
            return self._failure(trajectory, f"{type(error).__name__}: {error}", place=code_place(error))
        finally:
            exit_fork(pid)
        if trajectory.status == SampleStatus.pending:
            return self._failure(trajectory, "ended without a status; call add_generation, or set trajectory.status")
        if trajectory.reward is not None and not is_finite(trajectory.reward):
            return self._failure(
                trajectory, f"set a reward that must be a finite number, got {shown(trajectory.reward)}"
            )
        return None

    def _failure(self, trajectory: Trajectory, cause: str, *, place: str = "") -> Failure:
        where = f"{self._what} of trajectory {trajectory.id} (prompt row {trajectory.prompt.index + 1})"
        return Failure(cause=FailureCause.controller, message=f"{where} failed{place}: {cause}")


class ThreadSession:
    """A `GenerateSession` for another thread: its requests run in the event loop of the run.

    Args:
        num_sampled: tokens that the policy has generated of the trajectory; all turns together get at most the
            `max_new_tokens` of `params`. None: the requests are of several trajectories, and each has this limit.
    """

    def __init__(
        self, session: GenerateSession, loop: asyncio.AbstractEventLoop, *, num_sampled: int | None = None
    ) -> None:
        self._session, self._loop, self._num_requests = session, loop, 0
        self._num_sampled = num_sampled
        self.params, self.config, self.tokenizer = session.params, session.config, session.tokenizer
        self.is_evaluation, self.access = session.is_evaluation, session.access

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """See GenerateSession. Requests may be concurrent, from any event loop.

        The answer is empty, with the finish reason `length`, if the turns before it used up the tokens of a trajectory.
        """
        self._num_requests += 1
        # Open requests of an engine have different names.
        own, given = replace(self._session, rid=f"{self._session.rid}-{self._num_requests}"), params or self.params
        if self._num_sampled is not None:
            left = self.params.max_new_tokens - self._num_sampled
            if left <= 0:
                return FULL
            longest = min(given.max_new_tokens, left)
            given = replace(given, max_new_tokens=longest, min_new_tokens=min(given.min_new_tokens, longest))
        answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(own.generate(token_ids, given), self._loop))
        if self._num_sampled is not None:
            self._num_sampled += len(answer.output_ids)
        return answer

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
        parts = urlsplit(self._session.pool.present[0].address.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

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
