"""Writing checkpoints while training goes on: a thread of each rank, and a process group that it has for itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


class Background:
    """Runs saves one after the other, in the order in which they were given; that order is the same on all ranks.

    Making it is a collective. What a save reads must not change any more: it is given copies.

    Args:
        timeout_minutes: of a collective of a save.

    Example:
        background = Background(timeout_minutes=30.0)
        background.submit(lambda: save(copies, process_group=background.group))
        background.finish()
    """

    def __init__(self, *, timeout_minutes: float) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: list[Future[None]] = []

    def submit(self, save: Callable[[], None]) -> None:
        """Has a save run when those before it are done."""
        self._pending.append(self._pool.submit(save))

    def finish(self) -> None:
        """Returns when all saves have been made; raises what one of them raised. May be called by any thread."""
        while self._pending:
            self._pending[0].result()
            self._pending.pop(0)

    def close(self) -> None:
        """Waits for the last save, and ends the thread."""
        self._pool.shutdown()
