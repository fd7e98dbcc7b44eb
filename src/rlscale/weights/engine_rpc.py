"""Calls to engines from a thread that has no event loop and may sit in a collective meanwhile."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from rlscale.errors import EngineError
from rlscale.protocols import Engine

T = TypeVar("T")
GRACE_S = 5.0  # what a call may take beyond the timeout of the transport below it, whose error says more


class EngineCalls:
    """The engines of a channel and an event loop in a thread that talks to them."""

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.engines: list[Engine] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> str:
        return ", ".join(engine.address.name for engine in self.engines)

    def start(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begins one call."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="weight channel calls", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def start_all(self, call: Callable[[Engine], Coroutine[Any, Any, T]]) -> list["Future[T]"]:
        return [self.start(call(engine)) for engine in self.engines]

    def on_all(self, call: Callable[[Engine], Coroutine[Any, Any, T]]) -> list[T]:
        """Calls every engine at once; the answers in their order, or the first failure."""
        futures = self.start_all(call)
        self.settle(futures)
        return [future.result() for future in futures]

    def settle(self, futures: Sequence["Future[Any]"]) -> None:
        """Returns when all are done, or raises the first failure at once."""
        done, pending = wait(futures, timeout=self.timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
        if pending:
            raise EngineError(f"{self.names}: weight sync must go on within {self.timeout_s:g} s, got no answer")

    def drop_engines(self) -> None:
        """Closes the clients."""
        engines, self.engines = self.engines, []
        self.settle([self.start(engine.close()) for engine in engines])

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def in_thread(run: Callable[[], T]) -> "Future[T]":
    """Runs something that may hang in a thread of its own."""
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(run())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=target, name="weight group", daemon=True).start()
    return future
