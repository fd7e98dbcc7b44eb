"""TensorBoard event files, read back with TensorBoard."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlscale.config import LoggingConfig, TensorboardConfig
from rlscale.observe.jsonl import JsonlSink
from rlscale.observe.trackers.open_trackers import TrackedRun, open_trackers
from rlscale.observe.trackers.tensorboard_files import event_folder
from rlscale.protocols import MetricSink


def start(folder: Path, *, resume_at: int = 0, interval: int = 1, lines: list[str] | None = None) -> list[MetricSink]:
    """Opens the metrics file and the tracker for one start of a run."""
    metrics = folder / "metrics.jsonl"
    run = TrackedRun(
        folder=folder,
        config={},
        resume_at_step=resume_at,
        steps_per_rollout=2,
        metrics_file=metrics,
        interval=interval,
    )
    sink = JsonlSink(metrics, resume_at_step=resume_at)
    config = LoggingConfig(tensorboard=TensorboardConfig(enabled=True))
    return [
        sink,
        *open_trackers(config, run, report=([] if lines is None else lines).append, warn=pytest.fail),
    ]


def log(sinks: list[MetricSink], steps: range, *, offset: float = 0.0) -> None:
    for step in steps:
        for sink in sinks:
            sink.log({"reward/mean": step + offset, "weights/version": step + 1.0}, step=step)


def read(folder: Path, name: str = "reward/mean") -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_every_metric_is_a_scalar_at_its_rollout(tmp_path: Path) -> None:
    lines: list[str] = []
    sinks = start(tmp_path, lines=lines)
    log(sinks, range(3))
    assert lines == [f"tensorboard: {tmp_path / 'tensorboard'}"]
    assert read(tmp_path / "tensorboard") == [(0, 0.0), (1, 1.0), (2, 2.0)]  # on disk without being closed
    assert read(tmp_path / "tensorboard", "weights/version") == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_resumed_run_hides_repeated_steps(tmp_path: Path) -> None:
    log(start(tmp_path), range(5))  # killed here
    sinks = start(tmp_path, resume_at=3)
    log(sinks, range(3, 6), offset=0.5)
    for sink in sinks:
        sink.close()
    assert read(tmp_path / "tensorboard") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5)]


def test_rewind_hides_repeated_steps(tmp_path: Path) -> None:
    sinks = start(tmp_path)
    log(sinks, range(4))
    for sink in sinks:
        sink.rewind(2)
    log(sinks, range(2, 4), offset=0.5)
    assert read(tmp_path / "tensorboard") == [(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.5)]


def test_a_tracker_enabled_later_gets_earlier_records(tmp_path: Path) -> None:
    log([JsonlSink(tmp_path / "metrics.jsonl")], range(4))
    log(start(tmp_path, resume_at=3), range(3, 5))
    assert read(tmp_path / "tensorboard") == [(step, float(step)) for step in range(5)]


def test_interval_applies_to_rollouts_not_to_evaluations(tmp_path: Path) -> None:
    sinks = start(tmp_path, interval=3)
    log(sinks, range(7))
    for sink in sinks:
        sink.log({"eval/reward_mean": 0.5}, step=7)
    assert [step for step, _ in read(tmp_path / "tensorboard")] == [0, 3, 6]
    assert read(tmp_path / "tensorboard", "eval/reward_mean") == [(7, 0.5)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TensorboardConfig(), "runs/a/tensorboard"),
        (TensorboardConfig(project_name="p", experiment_name="e"), "runs/a/tensorboard/p/e"),
        (TensorboardConfig(dir="/tb"), "/tb/a"),
        (TensorboardConfig(dir="/tb", project_name="p"), "/tb/p/a"),
        (TensorboardConfig(dir="/tb", project_name="p", experiment_name="e"), "/tb/p/e"),
    ],
)
def test_folders(config: TensorboardConfig, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    assert event_folder(config, Path("runs/a")) == Path(expected)


def test_the_environment_variable_sets_a_shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", "/shared")
    assert event_folder(TensorboardConfig(), Path("runs/a")) == Path("/shared/a")
    assert event_folder(TensorboardConfig(dir="/tb"), Path("runs/a")) == Path("/tb/a")
