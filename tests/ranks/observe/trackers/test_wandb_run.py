"""Weights & Biases tracker: offline files are read back; a fake server receives online runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import LoggingConfig, WandbConfig, WandbMode, load_config, to_dict
from rlscale.errors import ConfigError, DataError
from rlscale.observe.jsonl import JsonlSink
from rlscale.observe.trackers.open_trackers import TrackedRun, open_trackers
from rlscale.observe.trackers.wandb_files import read_history, read_records
from rlscale.observe.trackers.wandb_rows import WandbRows
from rlscale.protocols import MetricSink
from rlscale.secrets import REDACTED, redact
from tests.ranks.observe.trackers.wandb_server import wandb_server

KEY = "5ec2e7" * 6 + "5ec2"
"""Fake key with the length of a real one, which wandb checks."""

STEPS_PER_ROLLOUT = 2


@pytest.fixture(autouse=True)
def _without_wandb_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "home"))


def start(folder: Path, *, resume_at: int = 0, interval: int = 1, **values: Any) -> list[MetricSink]:
    """Opens the metrics file and the tracker for one start of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    run = TrackedRun(
        folder=folder,
        config={"algo": {"eps_clip": 0.2}},
        resume_at_step=resume_at,
        steps_per_rollout=STEPS_PER_ROLLOUT,
        metrics_file=metrics,
        interval=interval,
    )
    sink = JsonlSink(metrics, resume_at_step=resume_at)
    config = LoggingConfig(wandb=WandbConfig(**{"enabled": True, "mode": WandbMode.offline} | values))
    return [sink, *open_trackers(config, run, report=lambda _: None, warn=pytest.fail)]


def log(sinks: list[MetricSink], steps: range, *, offset: float = 0.0) -> None:
    for step in steps:
        for sink in sinks:
            sink.log({"reward/mean": step + offset, "train/loss": 0.5, "weights/version": step + 1.0}, step=step)


def evaluate(sinks: list[MetricSink], step: int) -> None:
    for sink in sinks:
        sink.log({"eval/reward_mean": step / 10}, step=step)


def close(sinks: list[MetricSink]) -> None:
    for sink in sinks:
        sink.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def rows(folder: Path) -> list[dict[str, float]]:
    """Rows that a sync of all files uploads, without the fields that wandb adds."""
    found = [row for file in files(folder) for row in read_history(file)]
    return [{name: float(json.loads(value)) for name, value in row.items() if name[0] != "_"} for row in found]


def run_records(folder: Path) -> list[Any]:
    return [record.run for file in files(folder) for record in read_records(file) if record.HasField("run")]


def test_records_become_rows_with_their_axes(tmp_path: Path) -> None:
    sinks = start(tmp_path)
    evaluate(sinks, 0)
    log(sinks, range(2))
    evaluate(sinks, 2)
    close(sinks)
    assert rows(tmp_path) == [
        {"eval/reward_mean": 0.0, "eval/step": 0},
        {"reward/mean": 0, "train/loss": 0.5, "weights/version": 1, "rollout/step": 0, "train/step": 0},
        {"reward/mean": 1, "train/loss": 0.5, "weights/version": 2, "rollout/step": 1, "train/step": 2},
        {"eval/reward_mean": 0.2, "eval/step": 2},
    ]
    defined = [record.metric for file in files(tmp_path) for record in read_records(file) if record.HasField("metric")]
    assert {metric.name: metric.step_metric for metric in defined if metric.step_metric} == {
        "train/loss": "train/step",
        "eval/reward_mean": "eval/step",
        "reward/mean": "rollout/step",
        "weights/version": "rollout/step",
    }


def test_always_use_train_step_counts_in_optimiser_steps(tmp_path: Path) -> None:
    sinks = start(tmp_path, always_use_train_step=True)
    log(sinks, range(2))
    evaluate(sinks, 2)
    close(sinks)
    assert [row.get("rollout/step") for row in rows(tmp_path)] == [0, STEPS_PER_ROLLOUT, None]
    assert rows(tmp_path)[-1]["eval/step"] == 2 * STEPS_PER_ROLLOUT


def test_config_names_map_to_wandb_fields(tmp_path: Path) -> None:
    close(start(tmp_path / "run", project="proj", team="team", group="grp", run_id="abc", dir=str(tmp_path / "w")))
    (run,) = run_records(tmp_path / "w")
    suffix = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]["suffix"]
    assert (run.project, run.entity, run.run_id) == ("proj", "team", "abc")
    assert (run.run_group, run.display_name) == (f"grp-{suffix}", f"run-{suffix}")
    assert len(suffix) == 6
    assert json.loads(next(item.value_json for item in run.config.update if item.key == "algo")) == {"eps_clip": 0.2}
    assert not (tmp_path / "run" / "wandb").exists()


def test_without_a_random_suffix_names_are_unchanged(tmp_path: Path) -> None:
    close(start(tmp_path / "run", group="grp", random_suffix=False))
    (run,) = run_records(tmp_path / "run")
    assert (run.run_group, run.display_name, run.project) == ("grp", "run", "rlscale")


def test_a_resumed_run_continues_its_wandb_run_without_duplicates(tmp_path: Path) -> None:
    sinks = start(tmp_path)
    evaluate(sinks, 0)
    log(sinks, range(5))
    close(sinks)
    sinks = start(tmp_path, resume_at=3)
    log(sinks, range(3, 7))
    evaluate(sinks, 7)
    close(sinks)
    assert len({run.run_id for run in run_records(tmp_path)}) == 1
    assert len({run.display_name for run in run_records(tmp_path)}) == 1
    assert [row.get("rollout/step") for row in rows(tmp_path)] == [None, *range(7), None]
    steps = [json.loads(row["_step"]) for file in files(tmp_path) for row in read_history(file)]
    assert steps == list(range(9))


def test_rows_lost_in_a_kill_come_from_the_metrics_file(tmp_path: Path) -> None:
    """Wandb writes its file in the background; killing the driver ends this too."""
    code = f"""
import os, signal
from pathlib import Path
from tests.ranks.observe.trackers.test_wandb_run import log, start
log(start(Path({str(tmp_path)!r})), range(5))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[4])
    assert done.returncode == -signal.SIGKILL
    sinks = start(tmp_path, resume_at=3)
    log(sinks, range(3, 6))
    close(sinks)
    assert [row["rollout/step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_records_in_another_order_after_a_resume_are_neither_doubled_nor_lost(tmp_path: Path) -> None:
    """As evaluations that run concurrently with training make them."""
    sinks = start(tmp_path)
    log(sinks, range(2))
    evaluate(sinks, 1)
    log(sinks, range(2, 4))
    evaluate(sinks, 3)
    close(sinks)
    sinks = start(tmp_path, resume_at=2)
    evaluate(sinks, 3)
    log(sinks, range(2, 5))
    evaluate(sinks, 5)
    close(sinks)
    found = rows(tmp_path)
    assert [row["rollout/step"] for row in found if "rollout/step" in row] == [0, 1, 2, 3, 4]
    assert [row["eval/step"] for row in found if "eval/step" in row] == [1, 3, 5]


def test_rows_of_other_folders_and_runs_are_counted_apart(tmp_path: Path) -> None:
    """The W&B run has three rows of another folder; a crash loses the second of the two that this folder adds."""
    rows = WandbRows(tmp_path, run_id="shared")
    rows.keep(3)
    assert [rows.append("rollout 0"), rows.append("rollout 1")] == [3, 4]
    other = WandbRows(tmp_path, run_id="other")
    other.keep(0)
    assert "rollout 0" not in other and other.append("rollout 0") == 0
    again = WandbRows(tmp_path, run_id="shared")
    again.keep(4)
    assert "rollout 0" in again and "rollout 1" not in again
    assert again.append("rollout 1") == 4


def test_an_unreadable_file_of_rows_is_named(tmp_path: Path) -> None:
    close(start(tmp_path))
    (tmp_path / "wandb_rows.jsonl").write_text('{"row": 3}\n')
    with pytest.raises(DataError, match=r"wandb_rows\.jsonl must hold one JSON object per line, got .*; remove it"):
        start(tmp_path)


def test_rewind_repeats_no_row(tmp_path: Path) -> None:
    sinks = start(tmp_path)
    log(sinks, range(4))
    for sink in sinks:
        sink.rewind(2)
    log(sinks, range(2, 6))
    close(sinks)
    assert [row["rollout/step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_interval_applies_across_a_resume(tmp_path: Path) -> None:
    sinks = start(tmp_path, interval=2)
    log(sinks, range(4))
    close(sinks)
    sinks = start(tmp_path, resume_at=3, interval=2)
    log(sinks, range(3, 7))
    evaluate(sinks, 7)
    close(sinks)
    assert [row.get("rollout/step") for row in rows(tmp_path)] == [0, 2, 4, 6, None]


def test_another_run_id_starts_another_run(tmp_path: Path) -> None:
    close(start(tmp_path, run_id="first"))
    close(start(tmp_path))
    close(start(tmp_path, run_id="second"))
    assert [run.run_id for run in run_records(tmp_path)] == ["first", "first", "second"]


def test_mode_disabled_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(start(tmp_path / "a", mode=WandbMode.disabled)) == 1
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert len(start(tmp_path / "b", mode=None)) == 1
    assert not list(tmp_path.glob("*/wandb"))


def test_the_key_is_not_stored(tmp_path: Path) -> None:
    config = load_config(["logging=wandb", "logging.wandb.mode=offline", f"logging.wandb.key={KEY}"])
    assert KEY not in repr(config.logging)
    redacted = redact(to_dict(config))
    assert redacted["logging"]["wandb"]["key"] == REDACTED
    assert KEY not in json.dumps(redacted)
    run = TrackedRun(
        folder=tmp_path, config=redacted, resume_at_step=0, steps_per_rollout=1, metrics_file=tmp_path / "metrics.jsonl"
    )
    close(open_trackers(config.logging, run, report=lambda _: None, warn=pytest.fail))
    everything = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(everything) > 5
    assert [file for file in everything if KEY.encode() in file.read_bytes()] == []


def test_online_sends_to_the_host_with_the_key(tmp_path: Path) -> None:
    with wandb_server() as server:
        sinks = start(tmp_path, mode=WandbMode.online, host=server.url, key=KEY, team="team", project="proj")
        log(sinks, range(3))
        close(sinks)
    assert server.keys == {KEY}
    ((run_id, run),) = server.runs.items()
    assert (run["given"]["project"], run["given"]["entity"]) == ("proj", "team")
    assert [row["rollout/step"] for row in server.history(run_id)] == [0, 1, 2]


def test_online_a_resumed_run_continues_at_the_rows_of_the_server(tmp_path: Path) -> None:
    """The server did not get the third rollout; the fourth is repeated."""
    with wandb_server() as server:
        online = {"mode": WandbMode.online, "host": server.url, "key": KEY}
        sinks = start(tmp_path, **online)
        evaluate(sinks, 0)
        log(sinks, range(2))
        close(sinks)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "time": 1.0, "reward/mean": 2.0, "train/loss": 0.5}\n')
        sinks = start(tmp_path, resume_at=3, **online)
        log(sinks, range(3, 5))
        close(sinks)
        sinks = start(tmp_path, resume_at=4, **online)
        log(sinks, range(4, 6))
        close(sinks)
    (run_id,) = server.runs
    rows = server.history(run_id)
    assert [row.get("rollout/step") for row in rows] == [None, 0, 1, 2, 3, 4, 5]
    assert [row["_step"] for row in rows] == list(range(7))


def test_a_refused_login_is_a_config_error(tmp_path: Path) -> None:
    with wandb_server() as server:
        server.refuses = True
        with pytest.raises(ConfigError) as caught:
            start(tmp_path, mode=WandbMode.online, key=KEY, host=server.url)
    assert str(caught.value).startswith("logging.wandb must be able to start a run, got ")
    assert "401" in str(caught.value) and "logging.wandb.mode=offline" in str(caught.value)
    assert KEY not in str(caught.value)
