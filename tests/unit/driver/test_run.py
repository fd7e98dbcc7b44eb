"""Attempts of a run: what restarts its trainers, and what ends it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.checkpoint.store import CheckpointStore
from rlscale.control.failures import watch_for_failures
from rlscale.control.loop_config import Progress
from rlscale.control.signals import cancellation_as_interrupt
from rlscale.driver.run import ResumePoint, Run
from rlscale.errors import WorkerError
from tests.unit.config.rules.valid_config import config_with

TRAINERS = SimpleNamespace(names=["actor rank 0"], kill=lambda: None)


class ScriptedRun(Run):
    """A run whose trainers die in the first attempt: before its end, or while a signal ends it."""

    def __init__(self, folder: Path, *, ends_by: signal.Signals | None = None) -> None:
        self.lines: list[str] = []
        self.num_attempts, self._ends_by = 0, ends_by
        prompts = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        prepared: Any = SimpleNamespace(config=config_with({"fault_tolerance.enabled": True}), prompts=prompts)
        observer: Any = SimpleNamespace(
            warn=self.lines.append, phase=lambda name: None, rewind=lambda step: None, console=None
        )
        place: Any = SimpleNamespace(path=folder, metrics=folder / "metrics.jsonl")
        store = CheckpointStore(folder / "checkpoints", keep_last=1)
        super().__init__(prepared, folder=place, store=store, observer=observer)

    @asynccontextmanager
    async def _open_engines(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(num_nodes=1), None

    def _build_trainers(self, bundles: Any) -> Any:
        return TRAINERS

    async def _train(self, bundles: Any, trainers: Any, engines: Any, start: ResumePoint) -> Progress:
        self.num_attempts += 1
        dying = asyncio.Event()

        async def watcher() -> None:
            await dying.wait()
            raise WorkerError("actor rank 0", "its process died", died=True)

        if self.num_attempts > 1:
            return start.progress
        async with watch_for_failures([watcher()]):
            if self._ends_by is not None:
                os.kill(os.getpid(), self._ends_by)
            else:
                dying.set()
            try:
                await asyncio.sleep(60)
            finally:
                dying.set()  # the signal has reached the trainers, too
                await asyncio.sleep(0.01)
        raise AssertionError("the watcher or the signal ends the attempt")


def run(scripted: ScriptedRun) -> Progress:
    with cancellation_as_interrupt():
        return asyncio.run(scripted.run(ResumePoint(progress=Progress(), checkpoint=None)))


def test_trainers_that_die_are_restarted(tmp_path: Path) -> None:
    scripted = ScriptedRun(tmp_path)
    assert run(scripted) == Progress() and scripted.num_attempts == 2
    assert scripted.lines == [
        "actor rank 0: its process died; restarting the trainers from the beginning (restart 1 of at most 8)"
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_trainers_that_die_by_the_signal_that_ends_the_run_are_not_restarted(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A scheduler sends SIGTERM to every process of a job; a restarted run would ignore further ones."""
    scripted = ScriptedRun(tmp_path, ends_by=number)
    with pytest.raises(KeyboardInterrupt):
        run(scripted)
    assert scripted.num_attempts == 1 and scripted.lines == []
