"""Checkpoint writes that run concurrently with training, on a separate thread and process group of each rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


class AsyncSaver:
    """Runs saves one after the other, in the order of `submit`, which must be the same on all ranks.

    The constructor is a collective. The data of a save must not change afterwards: pass copies.

    Args:
        timeout_minutes: limit for a collective of a save.

    Example:
        saver = AsyncSaver(timeout_minutes=30.0)
        saver.submit(lambda: save(copies, process_group=saver.group))
        saver.finish()
    """

    def __init__(self, *, timeout_minutes: float) -> None:
        # A separate group: collectives of a save must not interleave with those of training.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: list[Future[None]] = []

    def submit(self, save: Callable[[], None]) -> None:
        """Queues a save."""
        self._pending.append(self._pool.submit(save))

    def finish(self) -> None:
        """Waits for all queued saves and raises the first error. May be called from any thread."""
        while self._pending:
            # Removed after `result`: a save that failed raises at every further call.
            self._pending[0].result()
            self._pending.pop(0)

    def close(self) -> None:
        """Waits for the last save and ends the thread."""
        self._pool.shutdown()
