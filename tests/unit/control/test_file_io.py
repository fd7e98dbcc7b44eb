"""Writes in a thread end before their caller does."""

import asyncio
import threading
from pathlib import Path

import pytest

from rlscale.control.file_io import write_in_thread


async def test_it_returns_the_result_of_the_function() -> None:
    assert await write_in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await write_in_thread(divmod, 7, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_waits_for_the_thread(tmp_path: Path, fails: bool) -> None:
    began, may_end = threading.Event(), threading.Event()

    def write() -> None:
        began.set()
        may_end.wait(30)
        (tmp_path / "file").write_text("whole")
        if fails:
            raise OSError("the disk is full")

    task = asyncio.create_task(write_in_thread(write))
    await asyncio.to_thread(began.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done() and not (tmp_path / "file").exists()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "file").read_text() == "whole"
