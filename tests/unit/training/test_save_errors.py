"""Messages of checkpoints that cannot be written."""

import errno
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from rlscale.errors import WorkerError
from rlscale.training.save_errors import named_cause


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "rank 1: could not write its part of /runs/a: OSError: [Errno 28] No space left on device; free space on "
            "the disk and run the same command again: it resumes from the last checkpoint",
        ),
        (ValueError("no such shape"), "rank 1: could not write its part of /runs/a: ValueError: no such shape"),
    ],
)
def test_the_first_rank_that_fails_is_named_with_its_cause(cause: Exception, expected: str) -> None:
    failures = {2: (RuntimeError("a consequence"), None), 1: (cause, None)}
    with pytest.raises(WorkerError) as found, named_cause(Path("/runs/a")):
        raise CheckpointException("save", failures)  # type: ignore[arg-type]  # tracebacks are optional
    assert str(found.value) == expected


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), named_cause(Path("/runs/a")):
        raise KeyError("weight")


def test_a_rank_that_cannot_read_is_named() -> None:
    failures = {1: (OSError(errno.EIO, "Input/output error"), None)}
    with pytest.raises(WorkerError) as found, named_cause(Path("/runs/a"), task="read its part of"):
        raise CheckpointException("load", failures)  # type: ignore[arg-type]  # tracebacks are optional
    assert str(found.value) == "rank 1: could not read its part of /runs/a: OSError: [Errno 5] Input/output error"
