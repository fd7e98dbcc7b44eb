"""Environments of a run in processes, one lease for each: an environment is closed whatever happens.

open(task) ──> lease ──> step, step, ... ──> close          at its end, an error or a cancellation
                 └─ process of several environments: at a call that blocks it, or a crash, all of them have failed
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rlscale.agents.environment import Action, Task
from rlscale.agents.environment_child import EnvironmentSpec
from rlscale.config.groups.agent import AgentConfig
from rlscale.rewards.call_process import CallProcess, ChildProgram
from rlscale.rewards.call_server import decode_error
from rlscale.rewards.reward_value import GradingError

log = logging.getLogger(__name__)

_PROGRAM = ChildProgram(
    module="rlscale.agents.environment_child", name="an environment", timeout_key="agent.environment_timeout_s"
)
START_EXTRA_S = 60.0
"""Time of a process to import the environment, in addition to the deadline of its first call."""

CANCEL_GRACE_S = 5.0
"""Time of an event loop to reply that a call is cancelled; after it something blocks the loop."""

CLOSE_GRACE_S = 10.0
"""Time of all processes to close their environments at the end of a run."""

_POLL_S = 0.25


class EnvironmentFailed(Exception):
    """A call of an environment raised, was too late, or ended its process. One line."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Process:
    """A process with its environments."""

    process: CallProcess
    ready: asyncio.Event
    leases: set[int] = field(default_factory=set)  # numbers of its open environments
    is_draining: bool = False  # gets no more environments: one of its calls did not end
    is_lost: bool = False
    error: GradingError | None = None  # why it was lost


class EnvironmentLease:
    """An open environment. Its calls raise EnvironmentFailed."""

    def __init__(self, pool: "EnvironmentPool", host: _Process, number: int) -> None:
        self._pool, self._host, self.number = pool, host, number

    async def reset(self, task: Task) -> dict[str, Any]:
        """Creates the environment and starts its episode; `messages` and `tools`."""
        return await self._pool._call(self._host, "reset", self.number, task, extra_s=START_EXTRA_S)

    async def step(self, action: Action) -> dict[str, Any]:
        """Takes an answer of the policy; `messages`, `reward`, `done` and `metadata`."""
        return await self._pool._call(self._host, "step", self.number, action)


class EnvironmentPool:
    """Creates environments in processes. Used by one event loop at a time.

    Invariant: `num_open` leases are open; each is closed once, or ends with its process.

    Example:
        pool = EnvironmentPool(EnvironmentSpec(path="my_game:Game"), config.agent)
        async with pool.open() as environment:
            start = await environment.reset(task)
            result = await environment.step(Action(text="up"))
        await pool.close()
    """

    def __init__(self, spec: EnvironmentSpec, config: AgentConfig) -> None:
        self._spec, self._timeout_s, self._max_processes = (
            spec,
            config.environment_timeout_s,
            config.environment_processes,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hosts: list[_Process] = []
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._futures: dict[int, tuple[_Process, asyncio.Future[dict[str, Any] | GradingError]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_opened = 0

    @property
    def num_open(self) -> int:
        """Leases that are not closed yet."""
        return sum(len(host.leases) for host in self._hosts)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvironmentLease]:
        """A fresh environment, closed at the end of the body."""
        if self._loop is not asyncio.get_running_loop():
            self.kill()  # the processes of an event loop that has ended
            self._loop = asyncio.get_running_loop()
            self._spawn(self._poll())
        host = self._choose()
        lease = EnvironmentLease(self, host, next(self._numbers))
        host.leases.add(lease.number)
        self.num_opened += 1
        try:
            yield lease
        finally:
            # Not awaited here: a cancelled trajectory must not wait, and its cancellation must not end the close.
            self._spawn(self._close_lease(host, lease.number))

    async def close(self) -> None:
        """Closes all environments and ends the processes; waits for user code no longer than `CLOSE_GRACE_S`."""
        end = time.monotonic() + CLOSE_GRACE_S
        # Closes of ended trajectories run as tasks.
        while self.num_open and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._end(max(1.0, end - time.monotonic()))

    def kill(self) -> None:
        """Ends the processes at once, after a moment in which those with open environments close them."""
        self._end(CLOSE_GRACE_S)

    def _end(self, grace_s: float) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()
        for host in self._hosts:
            host.is_lost = True
            host.process.close_channel()
        end = time.monotonic() + (grace_s if self.num_open else 1.0)
        for host in self._hosts:
            if host.ready.is_set():
                host.process.wait(max(0.0, end - time.monotonic()))
            host.process.kill()
        self._hosts, self._futures, self._tasks, self._loop = [], {}, set(), None

    def _choose(self) -> _Process:
        """The process with the fewest environments; a new one while there are not enough."""
        # An idle process first: starting one takes a second.
        usable = [host for host in self._hosts if not host.is_draining]
        idle = [host for host in usable if not host.leases]
        if idle or len(usable) >= self._max_processes:
            return min(idle or usable, key=lambda host: len(host.leases))
        host: _Process

        def receive(_: CallProcess, message: dict[str, Any]) -> None:
            self._receive(host, message)

        process = CallProcess(
            _PROGRAM, self._spec, on_message=receive, on_end=lambda _: self._spawn(self._lose_ended(host))
        )
        host = _Process(process=process, ready=asyncio.Event())
        self._hosts.append(host)
        return host

    async def _call(self, host: _Process, kind: str, *arguments: Any, extra_s: float = 0.0) -> dict[str, Any]:
        """The values that a method returned.

        Raises:
            EnvironmentFailed: it returned none.
        """
        found = await self._reply(host, kind, *arguments, extra_s=0.0 if host.ready.is_set() else extra_s)
        if isinstance(found, GradingError):
            raise EnvironmentFailed(f"{kind} {_clause(found)}")
        if found.get("timed_out"):
            host.is_draining = True  # a thread of it may never end
            raise EnvironmentFailed(f"{kind} {self._late(found['place'])}")
        if "error" in found:
            raise EnvironmentFailed(f"{kind} {_clause(decode_error(found))}")
        return {name: value for name, value in found.items() if name != "id"}

    async def _reply(self, host: _Process, kind: str, *arguments: Any, extra_s: float) -> dict[str, Any] | GradingError:
        if host.is_lost:
            return host.error or GradingError(cause="its process has ended")
        number = next(self._calls)
        future: asyncio.Future[dict[str, Any] | GradingError] = asyncio.get_running_loop().create_future()
        self._futures[number] = host, future
        host.process.send_call(number, (kind, *arguments))
        try:
            done, _ = await asyncio.wait([future], timeout=self._timeout_s + extra_s)
            # A coroutine ends when it is cancelled; the thread of a plain method does not.
            if not done:
                host.process.send_cancel(number)
                done, _ = await asyncio.wait([future], timeout=CANCEL_GRACE_S)
            if not done:
                place = await host.process.stack_place()
                self._lose(host, GradingError(cause="its process was ended: another environment blocked it"))
                return GradingError(cause=self._late(place))
            return future.result()
        except asyncio.CancelledError:
            # The environment need not finish what no one waits for.
            if not host.is_lost:
                host.process.send_cancel(number)
            raise
        finally:
            self._futures.pop(number, None)

    def _late(self, place: str) -> str:
        where = f" ({place})" if place else ""
        return f"did not return within agent.environment_timeout_s={self._timeout_s:g}{where}"

    async def _close_lease(self, host: _Process, number: int) -> None:
        try:
            if not host.is_lost:
                await self._call(host, "close", number)
        except EnvironmentFailed as error:
            log.warning("closing an environment failed: %s", error)
        finally:
            host.leases.discard(number)
            if host.is_draining and not host.leases:
                self._lose(host, GradingError(cause="its process was replaced"))

    def _receive(self, host: _Process, message: dict[str, Any]) -> None:
        if "failed" in message:
            place = message["place"]
            self._lose(host, GradingError(cause=f"loading it failed: {message['failed']}", place=place))
        elif "is_async" in message:
            host.ready.set()
        else:
            _, future = self._futures.get(message["id"], (None, None))
            if future is not None and not future.done():
                future.set_result(message)

    async def _lose_ended(self, host: _Process) -> None:
        # The channel closes before the exit code is known.
        for _ in range(50):
            if not host.process.is_running:
                break
            await asyncio.sleep(0.01)
        self._lose(host, None)

    def _lose(self, host: _Process, error: GradingError | None) -> None:
        """Ends a process; all its environments have failed. None: it has ended by itself."""
        if host.is_lost:
            return
        # Set first: what follows calls back.
        host.is_lost = host.is_draining = True
        if host in self._hosts:
            self._hosts.remove(host)
        host.process.kill()
        host.error = error or host.process.describe_end()
        for owner, future in list(self._futures.values()):
            if owner is host and not future.done():
                future.set_result(host.error)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for host in list(self._hosts):
                host.process.check_alive()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _clause(error: GradingError) -> str:
    return str(error) if error.cause.startswith("did not ") else f"failed: {error}"
