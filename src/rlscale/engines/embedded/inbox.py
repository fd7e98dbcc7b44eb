"""Commands from any thread to the decode thread."""

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlscale.engines.server.generate_request import Refused

IDLE_WAKE_S = 1.0
ANSWER_S = 0.002  # lets the answer to the last command leave before preparing weights occupies the thread
FAILED_STATUS = 500


class Inbox:
    """Queue of commands that the decode thread runs between two steps.

    `post` may be called from any thread, everything else from the decode thread. A command receives the future of its
    caller; an exception in it becomes the exception of the future. After `close`, every command fails with the reason.

    Example:
        future = inbox.post(lambda future: future.set_result(42))    # any thread
        inbox.run_all(on_idle=None)                                  # decode thread
        future.result()                                              # 42
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.closed_by: BaseException | None = None

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def post(self, run: Callable[["Future[Any]"], None]) -> "Future[Any]":
        future: Future[Any] = Future()

        def command() -> None:
            # From here on the caller can no longer cancel the future.
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.closed_by is not None:
                    raise Refused(f"the decode thread has ended: {self.closed_by}", status=FAILED_STATUS)
                run(future)
            except Exception as e:
                future.set_exception(e)

        self._commands.put(command)
        if self.closed_by is not None:
            self._drain()  # the decode thread no longer does
        return future

    def run_all(self, *, on_idle: Callable[[], None] | None) -> None:
        """Runs every waiting command.

        Args:
            on_idle: called when no command arrives within `ANSWER_S`; then waits for one, at most `IDLE_WAKE_S`. None:
                does not wait at all.
        """
        with contextlib.suppress(queue.Empty):
            command = self._commands.get_nowait() if on_idle is None else self._wait(on_idle)
            while True:
                command()
                command = self._commands.get_nowait()

    def close(self, reason: BaseException) -> None:
        """Fails all commands from now on."""
        self.closed_by = self.closed_by or reason
        self._drain()

    def _wait(self, on_idle: Callable[[], None]) -> Callable[[], None]:
        """The next command. Raises queue.Empty when none arrives in time."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=ANSWER_S)
        on_idle()
        return self._commands.get(timeout=IDLE_WAKE_S)

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()
