"""Checks of the folders that a run writes."""

import fcntl
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.config import RunConfig, to_yaml
from rlscale.driver.preflight.run_paths import (
    LONGEST_SOCKET,
    MAX_SOCKET_PATH,
    check_disk_space,
    check_output_folders,
    check_run_folder,
    check_temporary_folder,
    check_unfinished_run,
)
from rlscale.plan.checkpoint_size import CheckpointSize, checkpoint_size
from rlscale.plan.model_size import list_architectures, policy_architecture
from rlscale.secrets import redact_yaml
from tests.unit.config.rules.valid_config import Values, config_with


def run_in(folder: Path, **values: object) -> RunConfig:
    return config_with({"run.dir": str(folder), "checkpoint.save": str(folder / "checkpoints"), **values})


def test_a_new_folder_is_not_created(tmp_path: Path) -> None:
    assert check_run_folder(run_in(tmp_path / "a" / "b")) == check_output_folders(run_in(tmp_path / "a" / "b")) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_is_not_a_run_folder(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (problem,) = check_run_folder(run_in(file / below))
    assert str(problem) == (
        f"run.dir must name a folder that can be written, got {file / below}; {file} is a file; choose another run.dir"
    )


def test_a_folder_in_use_names_the_process(tmp_path: Path) -> None:
    config = run_in(tmp_path)
    with RunFolder.open(tmp_path, config_yaml=redact_yaml(to_yaml(config))):
        (problem,) = check_run_folder(config)
        assert problem.value == f"{tmp_path} (in use by process {os.getpid()})"
    assert check_run_folder(config) == []


def test_the_check_holds_no_lock(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(str(os.getpid()))
    assert check_run_folder(run_in(tmp_path)) == []
    with (tmp_path / "run.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_of_another_config_is_not_continued(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, config_yaml=redact_yaml(to_yaml(run_in(tmp_path)))).close()
    assert check_unfinished_run(run_in(tmp_path)) == []
    other: Values = {"optim.lr": 0.5}
    (problem,) = check_unfinished_run(run_in(tmp_path, **other))
    assert problem.value.startswith(f"{tmp_path}, whose run differs in optim.lr")
    assert check_unfinished_run(run_in(tmp_path, **other, **{"run.resume_changed": True})) == []
    # A finished run is kept, and another folder is used.
    (tmp_path / "finished.json").touch()
    assert check_unfinished_run(run_in(tmp_path, **other)) == []


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("checkpoint.save", {"checkpoint.save": "{file}"}),
        ("critic.save", {"critic.save": "{file}/critic"}),
        ("checkpoint.save_hf", {"checkpoint.save_hf": "{file}/{{rollout_id}}/hf"}),
        ("debug.save_rollout_data", {"debug.save_rollout_data": "{file}/{{rollout_id}}.jsonl"}),
        ("debug.profile_dir", {"debug.profile_dir": "{file}", "debug.profile_rollouts": [1]}),
        ("debug.memory_snapshot_dir", {"debug.memory_snapshot_dir": "{file}"}),
        ("logging.wandb.dir", {"logging.wandb.dir": "{file}", "logging.wandb.enabled": True}),
        ("model.cache_dir", {"model.cache_dir": "{file}"}),
    ],
)
def test_further_folders_can_be_written(key: str, values: Values, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    given = {name: value.format(file=file) if isinstance(value, str) else value for name, value in values.items()}
    (problem,) = check_output_folders(run_in(tmp_path / "run", **given))
    assert problem.path == key and f"{file} is a file; choose another {key}" in problem.fix


Usage = namedtuple("Usage", "total used free")
BIG: Values = {
    "model.build": None,
    "model.hf_checkpoint": "some/model",
    "model.num_layers": 10,
    "model.hidden_size": 4096,
    "model.num_attention_heads": 32,
    "model.vocab_size": 100_000,
    "train.backend": "fsdp",
}


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total=2e10, used=1e10, free=1e10))
    (problem,) = check_disk_space(run_in(tmp_path / "new", **BIG))
    assert problem.path == "checkpoint.save" and problem.value.endswith("with 10.0 GB")
    for enough in (
        {"checkpoint.save_final": False},
        {"debug.rollout_only": True},
        {"model.num_layers": None},
    ):
        assert check_disk_space(run_in(tmp_path / "new", **{**BIG, **enough})) == []


def test_everything_that_a_checkpoint_has_needs_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(**values: object) -> list[tuple[str, float]]:
        """Keys, and gigabytes that are missing on an empty disk."""
        found = check_disk_space(run_in(tmp_path / "new", **{**BIG, **values}))
        return [(each.path, float(each.rule.split()[5])) for each in found]

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total=1, used=1, free=0))
    ((_, plain),) = needed()
    size = checkpoint_of(run_in(tmp_path / "new", **BIG))
    assert plain == pytest.approx((size.total + size.export) / 1e9, abs=0.05)
    # The base is part of a checkpoint of adapters, but has no moments.
    ((_, adapters),) = needed(**{"train.lora.rank": 8})
    assert adapters == pytest.approx((size.weights + size.export) / 1e9, rel=0.02)
    ((_, frozen),) = needed(**{"train.freeze_params": ["layers"]})
    assert adapters < frozen < plain
    critic = {"algo.advantage_estimator": "ppo"}
    ((_, both),) = needed(**critic)
    assert both > 1.7 * plain
    # A critic that has a separate folder may be on another disk.
    apart = dict(needed(**critic, **{"critic.save": str(tmp_path / "critic")}))
    assert apart["checkpoint.save"] == plain and apart["critic.save"] == pytest.approx(both - plain, abs=0.1)


def checkpoint_of(config: RunConfig) -> CheckpointSize:
    size = checkpoint_size(config, list_architectures(config, policy_architecture(config.model)))
    assert size is not None
    return size


def test_sockets_of_ray_fit_below_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    config, limit = config_with({}), MAX_SOCKET_PATH - len(LONGEST_SOCKET)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    folder = "/scratch".ljust(limit + 1, "x")
    for fits in ("/tmp", folder[:-1]):
        monkeypatch.setenv("TMPDIR", fits)
        assert check_temporary_folder(config) == []
    monkeypatch.setenv("TMPDIR", folder)
    (problem,) = check_temporary_folder(config)
    assert str(problem) == (
        f"TMPDIR must be at most {limit} characters long, because Ray creates sockets below it, got {folder}; set "
        "RAY_TMPDIR to a shorter path, e.g. RAY_TMPDIR=/tmp"
    )
    # Ray that already runs has its own folder.
    assert check_temporary_folder(config_with({"cluster.ray_address": "10.0.0.1:6379"})) == []
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert check_temporary_folder(config) == []
