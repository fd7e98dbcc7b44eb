"""An event loop in a thread, for coroutines of user code.

    run's loop ── run_coroutine_threadsafe ──> loop of the thread: trajectory 7, trajectory 8, ...
                                                  └─ 7 blocks it: the thread is lost; 8 starts again in another one

Python cannot stop a thread. As a daemon it does not keep the process alive, and nothing waits for it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)

RESPONSE_S = 2.0
"""Time in which a loop that nothing blocks runs a new task, also on a busy machine."""

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines until the last one has left it. Used by one event loop, that of the run.

    Invariant: `lost` is set at most once; then no coroutine that has not ended will end soon, except maybe `blocker`.

    Example:
        thread = LoopThread()
        future = thread.submit(generate(trajectory), name="trajectory 7")
        await asyncio.wrap_future(future)
        thread.leave(is_used=True)
    """

    def __init__(self) -> None:
        self._loop, self._is_closing, self._num_calls = asyncio.new_event_loop(), False, 0
        self.lost = asyncio.Event()
        self.blocker: str | None = None  # name of the coroutine that blocks a lost thread; None: another task of it
        threading.Thread(target=self._run, name="user generate", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, _Result], *, name: str) -> "Future[_Result]":
        """Starts a coroutine in the thread, for a caller that leaves it later."""
        self._num_calls += 1
        return asyncio.run_coroutine_threadsafe(_named(coroutine, name), self._loop)

    async def check(self) -> bool:
        """Whether the loop still runs tasks; if it does not, the thread is lost."""
        if not self.lost.is_set():
            answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_nothing(), self._loop))
            await asyncio.wait([answer], timeout=RESPONSE_S)
            if not answer.done():
                answer.cancel()
                task = asyncio.current_task(self._loop)
                self.blocker = None if task is None else task.get_name()
                self.lost.set()
        return not self.lost.is_set()

    def leave(self, *, is_used: bool) -> None:
        """Ends the thread after the last call, once nothing blocks its loop.

        Args:
            is_used: there may be further calls.
        """
        self._num_calls -= 1
        if not is_used and not self._num_calls:
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        while not self._is_closing:
            self._survive(self._loop.run_forever)
        self._survive(lambda: self._loop.run_until_complete(_cancel_others()))
        self._loop.close()

    def _survive(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:  # sys.exit in a task that user code created; who awaits the task gets it, too
            log.warning("a task of user code raised %r; its event loop continues", error)


async def _named(coroutine: Coroutine[Any, Any, _Result], name: str) -> _Result:
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    task.set_name(name)
    return await coroutine


async def _nothing() -> None: ...


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
