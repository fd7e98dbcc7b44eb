"""TensorBoard tracker: event files, written by torch's SummaryWriter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlscale.config import TensorboardConfig
from rlscale.observe.trackers.open_trackers import TrackedRun
from rlscale.protocols import Metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def event_folder(config: TensorboardConfig, run_folder: Path) -> Path:
    """Folder of the event files of a run. All starts of the run use the same folder."""
    shared = config.dir or os.environ.get("TENSORBOARD_DIR")
    folder = Path(os.path.expanduser(shared)) if shared else run_folder / "tensorboard"
    experiment = config.experiment_name or (run_folder.name if shared else "")
    return folder / (config.project_name or "") / experiment


class TensorboardSink:
    """Logs a scalar per metric. A resumed run writes another file, which hides the repeated steps of earlier files.

    Args:
        folder: folder of the event files. Created if missing.
        run: facts about the run.
    """

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        self._folder, self._run = folder, run
        has_events = any(folder.glob("events.out.tfevents.*"))
        # Each record is flushed before the next rollout starts, so existing files are complete.
        self.may_lack_records = not has_events
        self._writer = _open(folder, purge_step=run.resume_at_step if has_events else None)

    @property
    def location(self) -> str:
        return str(self._folder)

    def log(self, metrics: Metrics, *, step: int) -> None:
        if not self._run.should_log(metrics, step=step):
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        # Without it a kill would lose minutes of records that no later start writes again.
        self._writer.flush()

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = _open(self._folder, purge_step=step)

    def close(self) -> None:
        self._writer.close()


def _open(folder: Path, *, purge_step: int | None) -> SummaryWriter:
    # Imports torch and tensorboard, which runs without TensorBoard do not need here.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder), purge_step=purge_step)
