"""Opens the trackers of a config, and gives each the metrics it lacks."""

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
    """What trackers are told about a run."""

    folder: Path
    config: Mapping[str, Any]  # resolved, without secrets
    resume_at_step: int  # rollouts that earlier starts of the run have done; 0: it is new
    steps_per_rollout: int  # optimiser steps
    metrics_file: Path  # already cut at `resume_at_step`
    interval: int = 1  # rollouts between two records

    def wants(self, metrics: Metrics, *, step: int) -> bool:
        """Whether a record goes to trackers: every `interval`-th rollout, and every evaluation."""
        return step % self.interval == 0 or any(name.startswith("eval/") for name in metrics)


class Tracker(MetricSink, Protocol):
    """A sink that may hold metrics of earlier starts of the run."""

    @property
    def place(self) -> str:
        """Where a user finds the metrics: a URL, a folder."""
        ...

    @property
    def may_lack_records(self) -> bool:
        """Whether to offer it the records of earlier starts, in the order of the metrics file."""
        ...


class Guarded:
    """A tracker whose failure does not end the run: the first one is told, and it gets nothing more in this start.

    A service may be down for a while during days of training; every record is in the metrics file all the same.
    """

    def __init__(self, tracker: MetricSink, *, name: str, warn: Callable[[str], None]) -> None:
        self._tracker, self._name, self._warn = tracker, name, warn
        self._failed = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._try(lambda: self._tracker.log(metrics, step=step), f"at rollout {step}")

    def rewind(self, step: int) -> None:
        self._try(lambda: self._tracker.rewind(step), f"going back to rollout {step}")

    def close(self) -> None:
        self._try(self._tracker.close, "at the end")

    def _try(self, call: Callable[[], None], when: str) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # whatever its library raises
            self._failed = True
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._warn(f"{self._name} failed {when} and gets no more metrics, metrics.jsonl has all of them; {text}")


def open_trackers(
    config: LoggingConfig, run: TrackedRun, *, tell: Callable[[str], None], warn: Callable[[str], None]
) -> list[MetricSink]:
    """The enabled trackers. One that lacks metrics of earlier starts (it was enabled later, or its last ones were lost
    in a crash) first gets them from the metrics file.

    Args:
        config: the group of the config.
        run: what they are told.
        tell: shows a line to the user: where each tracker keeps its metrics.
        warn: the same for a tracker that fails later.

    Raises:
        ConfigError: Weights & Biases refuses to start a run.
    """
    sinks: list[MetricSink] = []
    for name, tracker in _enabled(config, run):
        _catch_up(tracker, run)
        tell(f"{name}: {tracker.place}")
        sinks.append(Guarded(tracker, name=name, warn=warn))
    return sinks


def _enabled(config: LoggingConfig, run: TrackedRun) -> list[tuple[str, Tracker]]:
    trackers: list[tuple[str, Tracker]] = []
    if config.tensorboard.enabled:
        # Only now: a tracker's library is imported only when it is enabled.
        from rlscale.observe.trackers.tensorboard_files import TensorboardSink, event_folder

        folder = event_folder(config.tensorboard, run.folder)
        trackers.append(("tensorboard", TensorboardSink(folder, run)))
    if config.wandb.enabled and wandb_mode(config.wandb) != WandbMode.disabled:
        from rlscale.observe.trackers.wandb_run import WandbSink  # as above

        trackers.append(("wandb", WandbSink(config.wandb, run)))
    return trackers


def _catch_up(tracker: Tracker, run: TrackedRun) -> None:
    if not tracker.may_lack_records or not run.metrics_file.exists():
        return
    for record in read_records(run.metrics_file):
        metrics = {name: float(value) for name, value in record.items() if name not in RESERVED}
        tracker.log(metrics, step=record["step"])
