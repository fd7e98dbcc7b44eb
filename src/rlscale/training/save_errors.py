"""Failures of saves and loads: the same on all ranks, with the cause instead of the tracebacks of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from rlscale.errors import DataError, WorkerError, full_disk_advice


@contextmanager
def named_cause(folder: Path, *, task: str = "write its part of") -> Iterator[None]:
    """Names the first rank that cannot write or read its part of a checkpoint, and why.

    Raises:
        WorkerError: a rank failed, on all ranks alike.
    """
    try:
        yield
    except CheckpointException as error:  # a BaseException, so nothing that handles errors would see it
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise WorkerError(f"rank {rank}", _describe(cause, folder, task)) from cause


@contextmanager
def failing_together(folder: Path, *, task: str = "write its part of") -> Iterator[None]:
    """Raises the error of the first rank that fails inside on all ranks; the others would wait for it in a collective.

    A collective at the end of the block, which contains none itself.

    Raises:
        DataError: a rank raised one.
        WorkerError: a rank raised an OSError or SafetensorError.
    """
    failure: DataError | OSError | SafetensorError | None = None
    try:
        yield
    except (DataError, OSError, SafetensorError) as error:
        failure = error
    own = None
    if failure is not None:
        is_data = isinstance(failure, DataError)
        own = is_data, str(failure) if is_data else _describe(failure, folder, task)
    found: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, each in enumerate(found):
        if each is not None:
            is_data, text = each
            raise (DataError(text) if is_data else WorkerError(f"rank {rank}", text)) from failure


def _describe(cause: BaseException, folder: Path, task: str) -> str:
    return f"could not {task} {folder}: {type(cause).__name__}: {cause}{full_disk_advice(cause)}"
