"""Trackers, samples and secrets of a real run that is killed and resumed."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlscale.cli.report import main as report
from rlscale.observe.metrics.metric_names import MACHINE_PREFIXES
from rlscale.observe.rollout_log import DISTRIBUTIONS_FILE, SAMPLES_FILE
from rlscale.observe.trackers.wandb_files import read_history
from tests.integration.conftest import Command
from tests.integration.test_faults import GONE_WITHIN_S, wait_until

pytestmark = pytest.mark.nightly

KEY, TOKEN = "5ec2e7" * 6 + "5ec2", "70ce2" * 8
NUM_ROLLOUTS = 12
OVERRIDES = (
    "logging=[wandb,tensorboard]",
    "logging.wandb.mode=offline",
    f"logging.wandb.key={KEY}",
    f"train.env_vars={{SERVICE_TOKEN: {TOKEN}}}",
    "logging.log_passrate=true",
    "logging.num_samples=3",
    f"data.num_rollout={NUM_ROLLOUTS}",
    "checkpoint.save_interval=4",
    "eval.interval=6",
)


@pytest.fixture(scope="module")
def uninterrupted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    command = Command(folder=tmp_path_factory.mktemp("uninterrupted"), cache=cache)
    done = command.run(*OVERRIDES)
    assert done.code == 0, done.err
    return command


@pytest.fixture(scope="module")
def resumed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run killed after some rollouts and resumed. Checks its processes and logs for secrets."""
    command = Command(folder=tmp_path_factory.mktemp("resumed"), cache=cache)
    process = command.start(*OVERRIDES)

    def has_trained() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return (command.run_dir / "metrics.jsonl").exists() and len(command.metrics()) > 5

    wait_until(has_trained, 120, "training")
    started = command.processes().values()
    process.kill()
    process.communicate()
    assert any("wandb-core" in words for words in started)
    assert not [words for words in started if KEY in words or TOKEN in words]
    assert files_with(TOKEN, ray_logs(started)) == []
    wait_until(lambda: command.left_over() == {}, GONE_WITHIN_S, "the end of all processes")
    done = command.run(*OVERRIDES)
    assert done.code == 0, done.err
    assert "resuming from" in done.out
    assert KEY not in done.out + done.err and TOKEN not in done.out + done.err
    return command


def ray_logs(commands: Iterable[str]) -> Path:
    """The log folder of the Ray session to which these processes belong."""
    (folder,) = {match[1] for words in commands if (match := re.search(r"gcs_server .*--log_dir=(\S+)", words))}
    assert (Path(folder) / "runtime_env_agent.log").exists()
    return Path(folder)


def files_with(secret: str, folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def wandb_rows(run: Path) -> list[dict[str, float]]:
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    return [{name: json.loads(value) for name, value in row.items()} for file in files for row in read_history(file)]


def test_every_rollout_is_in_the_wandb_run_once(resumed: Command) -> None:
    rows = wandb_rows(resumed.run_dir)
    assert [row["rollout/step"] for row in rows if "train/loss" in row] == list(range(NUM_ROLLOUTS))
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    written = {(m["step"], m["train/loss"]) for m in resumed.metrics() if "train/loss" in m}
    assert {(row["rollout/step"], row["train/loss"]) for row in rows if "train/loss" in row} == written
    assert all("passrate/pass@4" in row for row in rows if "train/loss" in row)
    assert len({path.name.split("-")[-1] for path in resumed.run_dir.glob("wandb/offline-run-*")}) == 1


def test_every_rollout_is_in_tensorboard_once(resumed: Command) -> None:
    events = EventAccumulator(str(resumed.run_dir / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in events] == list(range(NUM_ROLLOUTS))
    losses = [m["train/loss"] for m in resumed.metrics() if "train/loss" in m]
    assert [event.value for event in events] == pytest.approx(losses)


@pytest.mark.parametrize("name", [SAMPLES_FILE, DISTRIBUTIONS_FILE])
def test_samples_are_those_of_the_uninterrupted_run(resumed: Command, uninterrupted: Command, name: str) -> None:
    assert (resumed.run_dir / name).read_bytes() == (uninterrupted.run_dir / name).read_bytes()


def test_kept_samples_have_the_logprobs_of_both_sides(uninterrupted: Command) -> None:
    samples = [json.loads(line) for line in (uninterrupted.run_dir / SAMPLES_FILE).read_text().splitlines()]
    assert len(samples) == 3 * NUM_ROLLOUTS
    for sample in samples:
        assert sample["trainer_logprobs"] == pytest.approx(sample["engine_logprobs"], abs=1e-4)
        assert {version for version, _ in sample["weight_versions"]} == {sample["step"]}


def test_keeping_samples_changes_no_number_of_the_run(uninterrupted: Command, tmp_path: Path) -> None:
    without = replace(uninterrupted, folder=tmp_path)
    done = without.run(*OVERRIDES[2:], "logging.num_samples=0")
    assert done.code == 0, done.err
    assert not (without.run_dir / SAMPLES_FILE).exists()
    assert untimed(without.metrics()) == untimed(uninterrupted.metrics())


def untimed(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MACHINE_PREFIXES)} for record in records
    ]


@pytest.mark.parametrize("secret", [KEY, TOKEN])
def test_secrets_are_in_no_file_of_the_run(resumed: Command, secret: str) -> None:
    assert any(resumed.run_dir.rglob("*.wandb"))
    assert files_with(secret, resumed.run_dir) == []


def test_a_report_shows_both_starts(resumed: Command) -> None:
    assert report([str(resumed.run_dir)]) == 0
    page = (resumed.run_dir / "report.html").read_text()
    assert "Start 2" in page and KEY not in page
