"""Blocking calls to the asynchronous engine clients, from a thread without an event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")
GRACE_S = 5.0  # beyond the timeout of the transport below a call, whose error has more detail


class EngineRpc:
    """The engines of a weight sync, and a thread whose event loop runs the calls to them.

    Calls continue while the caller is blocked in a collective. `infos` holds each engine's `info()` from `connect`.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.engines: list[Engine] = []
        self.infos: list[Mapping[str, Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> str:
        return ", ".join(engine.address.name for engine in self.engines)

    def connect(self, engines: Sequence[Engine]) -> None:
        """Replaces the engines and reads their infos."""
        self.engines = list(engines)
        self.infos = list(self.call_all(lambda engine: engine.info()))

    def start(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts one call and returns at once."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="weight sync calls", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call_all(self, call: Callable[[Engine], Coroutine[Any, Any, T]]) -> list[T]:
        """Calls every engine at once. Returns the answers in the order of the engines, or raises the first failure."""
        futures = [self.start(call(engine)) for engine in self.engines]
        self.wait_all(futures)
        return [future.result() for future in futures]

    def wait_all(self, futures: Sequence["Future[Any]"]) -> None:
        """Returns when all are done, or raises the first failure at once."""
        done, pending = wait(futures, timeout=self.timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
        if pending:
            raise EngineError(f"{self.names}: weight sync must continue within {self.timeout_s:g} s, got no answer")

    def try_all(self, calls: Sequence["Future[Any]"], action: str) -> None:
        """Waits for one call to each engine and only logs those that fail."""
        for engine, call in zip(self.engines, calls, strict=True):
            try:
                self.wait_all([call])
            except (EngineError, WeightSyncError) as e:
                log.warning("%s could not %s: %s", engine.address.name, action, e)

    def split_by_format(self, load_format: str) -> tuple[list[Engine], list[Engine]]:
        """The engines that read this format, and the others, which are SGLang."""
        readers: list[Engine] = []
        others: list[Engine] = []
        for engine, info in zip(self.engines, self.infos, strict=True):
            (readers if load_format in info.get("weight_formats", ()) else others).append(engine)
        return readers, others

    def close_clients(self) -> None:
        """Closes the clients of all engines and forgets the engines."""
        engines, self.engines, self.infos = self.engines, [], []
        self.wait_all([self.start(engine.close()) for engine in engines])

    def close(self) -> None:
        """Stops the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def run_in_thread(run: Callable[[], T]) -> "Future[T]":
    """Runs a call that may hang in its own daemon thread."""
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(run())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=target, name="weight group", daemon=True).start()
    return future
