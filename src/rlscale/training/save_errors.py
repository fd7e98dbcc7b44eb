"""Failures of saves, with the cause instead of the tracebacks of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from rlscale.errors import WorkerError, full_disk_advice


@contextmanager
def named_cause(folder: Path) -> Iterator[None]:
    """Names the first rank that cannot write its part of a checkpoint, and why.

    Raises:
        WorkerError: a rank failed, on all ranks alike.
    """
    try:
        yield
    except CheckpointException as error:  # a BaseException, so nothing that handles errors would see it
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        text = f"could not write its part of {folder}: {type(cause).__name__}: {cause}{full_disk_advice(cause)}"
        raise WorkerError(f"rank {rank}", text) from cause
