"""Opens the enabled trackers and replays records that they lack."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlscale.config import LoggingConfig, WandbMode
from rlscale.observe.jsonl import RESERVED, read_records
from rlscale.observe.trackers.check_trackers import wandb_mode
from rlscale.protocols import Metrics, MetricSink


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """Facts about a run that trackers need."""

    folder: Path
    config: Mapping[str, Any]  # resolved, without secrets
    resume_at_step: int  # rollouts completed by earlier starts; 0: a new run
    steps_per_rollout: int  # optimiser steps
    metrics_file: Path  # already truncated at `resume_at_step`
    interval: int = 1  # rollouts between two records

    def should_log(self, metrics: Metrics, *, step: int) -> bool:
        """True if a record goes to trackers: every `interval`-th rollout and every evaluation."""
        return step % self.interval == 0 or any(name.startswith("eval/") for name in metrics)


class Tracker(MetricSink, Protocol):
    """Sink that may contain metrics of earlier starts of the run."""

    @property
    def location(self) -> str:
        """URL or folder of the metrics, for the user."""
        ...

    @property
    def may_lack_records(self) -> bool:
        """True if `log` must get the records of earlier starts first, in the order of the metrics file."""
        ...


class GuardedTracker:
    """Tracker whose failure does not end the run. Warns about the first error and disables the tracker for this start.

    A service may be down for a while in days of training. The metrics file has every record anyway.
    """

    def __init__(self, tracker: MetricSink, *, name: str, warn: Callable[[str], None]) -> None:
        self._tracker, self._name, self._warn = tracker, name, warn
        self._failed = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._try(lambda: self._tracker.log(metrics, step=step), f"at rollout {step}")

    def rewind(self, step: int) -> None:
        self._try(lambda: self._tracker.rewind(step), f"on return to rollout {step}")

    def close(self) -> None:
        self._try(self._tracker.close, "at the end")

    def _try(self, call: Callable[[], None], when: str) -> None:
        if self._failed:
            return
        try:
            call()
        # A library may raise anything.
        except Exception as error:
            self._failed = True
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._warn(
                f"{self._name} failed {when} and receives no more metrics; metrics.jsonl has all of them; {text}"
            )


def open_trackers(
    config: LoggingConfig, run: TrackedRun, *, report: Callable[[str], None], warn: Callable[[str], None]
) -> list[MetricSink]:
    """Opens the enabled trackers.

    A tracker may lack metrics of earlier starts, because it was enabled later or a crash lost them. It first gets these
    records from the metrics file.

    Args:
        config: the config group `logging`.
        run: facts about the run.
        report: prints a line with the location of each tracker's metrics.
        warn: prints a warning when a tracker fails later.

    Raises:
        ConfigError: Weights & Biases refuses to start a run.
    """
    sinks: list[MetricSink] = []
    for name, tracker in _enabled(config, run):
        _replay_records(tracker, run)
        report(f"{name}: {tracker.location}")
        sinks.append(GuardedTracker(tracker, name=name, warn=warn))
    return sinks


def _enabled(config: LoggingConfig, run: TrackedRun) -> list[tuple[str, Tracker]]:
    trackers: list[tuple[str, Tracker]] = []
    if config.tensorboard.enabled:
        # Imported here, because a tracker's library is optional.
        from rlscale.observe.trackers.tensorboard_files import TensorboardSink, event_folder

        folder = event_folder(config.tensorboard, run.folder)
        trackers.append(("tensorboard", TensorboardSink(folder, run)))
    if config.wandb.enabled and wandb_mode(config.wandb) != WandbMode.disabled:
        from rlscale.observe.trackers.wandb_run import WandbSink  # optional too

        trackers.append(("wandb", WandbSink(config.wandb, run)))
    return trackers


def _replay_records(tracker: Tracker, run: TrackedRun) -> None:
    if not tracker.may_lack_records or not run.metrics_file.exists():
        return
    for record in read_records(run.metrics_file):
        metrics = {name: float(value) for name, value in record.items() if name not in RESERVED}
        tracker.log(metrics, step=record["step"])
