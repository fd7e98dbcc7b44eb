"""TensorBoard's event files, by its own writer."""

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
    """Where the event files of a run go; the same for every start of it."""
    shared = config.dir or os.environ.get("TENSORBOARD_DIR")
    folder = Path(shared).expanduser() if shared else run_folder / "tensorboard"
    experiment = config.experiment_name or (run_folder.name if shared else "")
    return folder / (config.project_name or "") / experiment


class TensorboardSink:
    """A scalar per metric. A resumed run writes a further file, which hides what it repeats of the earlier ones.

    Args:
        folder: made when missing.
        run: what is logged.
    """

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        self._folder, self._run = folder, run
        has_events = any(folder.glob("events.out.tfevents.*"))
        self.may_lack_records = not has_events  # every record is flushed before the next rollout begins
        self._writer = _open(folder, purge_step=run.resume_at_step if has_events else None)

    @property
    def place(self) -> str:
        return str(self._folder)

    def log(self, metrics: Metrics, *, step: int) -> None:
        if not self._run.wants(metrics, step=step):
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # else a kill would lose minutes that no later start writes again

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = _open(self._folder, purge_step=step)

    def close(self) -> None:
        self._writer.close()


def _open(folder: Path, *, purge_step: int | None) -> SummaryWriter:
    # It imports torch and tensorboard, which a run without TensorBoard need not have at this point.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder), purge_step=purge_step)
