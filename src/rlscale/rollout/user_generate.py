"""The user's generate function, kept apart from the event loop that drives the run.

    event loop of the run                       thread "user generate" with a second loop
      call(trajectory) ──────────────────────>    generate(trajectory, session)
      request <──────────────────────────────     await session.generate(...)
      answer  ──────────────────────────────>
      failure or None <──────────────────────

A function that blocks its loop delays only other trajectories of user code. One that exceeds the deadline is a failure,
and the next call gets a new thread: Python cannot stop a thread, but nothing waits for it.
"""

import asyncio
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from inspect import isawaitable, iscoroutinefunction
from typing import Any
from urllib.parse import urlsplit

from rlscale.errors import EngineError, WeightSyncError
from rlscale.plugins.daemon_call import call_in_daemon
from rlscale.rollout.generate_session import FULL, GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Generation, SampleStatus, SamplingParams, WeightVersion

log = logging.getLogger(__name__)

UserFunction = Callable[[Trajectory, Any], Awaitable[None] | None]


class UserGenerate:
    """Calls a user's generate function for one trajectory; see `group_generator.Generate`.

    Args:
        function: `async def generate(trajectory, session) -> None`, or a plain function, which gets its own thread.
        timeout_s: deadline of one trajectory.
    """

    def __init__(self, function: UserFunction, *, timeout_s: float) -> None:
        self._function, self._timeout_s = function, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """Returns what went wrong: an engine's error as `model_server`, anything else as `controller`."""
        loop = self._loop or self._start_loop()
        outer = asyncio.get_running_loop()
        own = replace(trajectory, turns=deepcopy(trajectory.turns), metadata=dict(trajectory.metadata))
        inner = ThreadSession(session, outer, num_sampled=own.num_sampled)
        future = asyncio.run_coroutine_threadsafe(self._run(own, inner), loop)
        try:
            async with asyncio.timeout(self._timeout_s):
                failure = await asyncio.wrap_future(future)
        except TimeoutError:
            future.cancel()
            # The loop may be blocked: the next trajectories get another one.
            self._loop = None if self._loop is loop else self._loop
            return _failure(trajectory, f"took longer than sampling.generate_timeout_s={self._timeout_s:g}")
        if isinstance(failure, WeightSyncError):
            raise failure
        # The function has ended. One that has not may still write to its copy.
        for name in ("turns", "metadata", "status", "reward"):
            setattr(trajectory, name, getattr(own, name))
        return failure

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="user generate", daemon=True).start()
        return loop

    async def _call(self, trajectory: Trajectory, session: "ThreadSession") -> None:
        call = getattr(self._function, "__call__", self._function)  # noqa: B004  # an object may have an async one
        if not (iscoroutinefunction(self._function) or iscoroutinefunction(call)):
            await call_in_daemon(self._function, trajectory, session)
        elif (found := self._function(trajectory, session)) is not None and isawaitable(found):
            await found

    async def _run(self, trajectory: Trajectory, session: "ThreadSession") -> Failure | WeightSyncError | None:
        try:
            await self._call(trajectory, session)
        except WeightSyncError as error:
            return error
        except EngineError as error:
            return Failure(cause=FailureCause.model_server, message=str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code, `sys.exit` included: a failure of this trajectory
            return _failure(trajectory, f"{type(error).__name__}: {error}", place=_place(error))
        if trajectory.status == SampleStatus.pending:
            return _failure(trajectory, "ended without a status; call add_generation, or set trajectory.status")
        return None


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
        self.is_evaluation = session.is_evaluation

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

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first engine."""
        parts = urlsplit(self._session.pool.present[0].address.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    @property
    def oldest_version(self) -> WeightVersion:
        """Version of the oldest weights that the engines may have."""
        return self._session.versions[0]

    @property
    def is_stopped(self) -> bool:
        """Whether the rollout has ended: answers are aborted from now on."""
        return self._session.stopped.is_set()


def _failure(trajectory: Trajectory, cause: str, *, place: str = "") -> Failure:
    where = f"generate of trajectory {trajectory.id} (prompt row {trajectory.prompt.index + 1})"
    return Failure(cause=FailureCause.controller, message=f"{where} failed{place}: {cause}")


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised, i.e. the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
