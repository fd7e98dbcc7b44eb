"""Mistakes in YAML files are told with file and line; a user's own folder adds options."""

from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.config.folder import ConfigFolders
from tests.unit.config.mistakes import mistakes, only_mistake

MINE = """\
# @package _global_
defaults:
  - override /model: tiny_qwen3
  - override /data: arithmetic
  - override /rollout: embedded
  - override /reward: exact_match
  - override /train: fsdp
  - override /cluster: cpu
data:
  num_rollout: 1
batch:
  rollout_batch_size: 4
  n_samples_per_prompt: 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "algo").mkdir()
    return tmp_path


def write(folder: Path, text: str, name: str = "experiment/mine") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_an_experiment_of_ones_own(folder: Path) -> None:
    write(folder, MINE)
    assert load_config(["experiment=mine"], config_dir=folder).batch.rollout_batch_size == 4
    assert "did you mean mine?" in only_mistake(["experiment=mnie"], config_dir=folder)
    assert "experiment must be one of its options, got mine" in only_mistake(["experiment=mine"])


def test_an_option_of_ones_own(folder: Path) -> None:
    write(folder, "eps_clip: 0.7\n", "algo/wide")
    assert load_config(["algo=wide"], config_dir=folder).algo.eps_clip == 0.7


def test_mistakes_in_a_file_are_told_with_their_line(folder: Path) -> None:
    file = write(folder, MINE + "algo:\n  eps_clp: 0.1\n  eps_clip: abc\noptim:\n  lr: -1\n")
    assert mistakes("experiment=mine", "train.sed=3", config_dir=folder) == [
        "train.sed must be a known key, got 3; did you mean train.seed? (command line)",
        f"algo.eps_clp must be a known key, got 0.1; did you mean algo.eps_clip? ({file}:15)",
        f"algo.eps_clip must be a number, got abc ({file}:16)",
        f"optim.lr must be >= 0, got -1.0 ({file}:18)",
    ]


def test_a_rule_points_to_the_file_that_set_the_key(folder: Path) -> None:
    file = write(folder, MINE + "  global_batch_size: 5\n")
    assert only_mistake(["experiment=mine"], config_dir=folder).endswith(f"({file}:14)")
    typed = only_mistake(["experiment=mine", "batch.global_batch_size=6"], config_dir=folder)
    assert typed.endswith("(command line)")


def test_a_key_without_default_must_be_set(folder: Path) -> None:
    write(folder, MINE.replace("  rollout_batch_size: 4\n", ""))
    found = only_mistake(["experiment=mine"], config_dir=folder)
    assert found.startswith("batch.rollout_batch_size must be set, got nothing; add batch.rollout_batch_size=<value>")
    assert load_config(["experiment=mine", "batch.rollout_batch_size=2"], config_dir=folder)


def test_a_file_that_names_no_option(folder: Path) -> None:
    file = write(folder, MINE.replace("model: tiny_qwen3", "model: qwen9"))
    found = only_mistake(["experiment=mine"], config_dir=folder)
    options = ", ".join(ConfigFolders.find().groups()["model"])
    assert found == f"model must be one of its options, got qwen9; options: {options} ({file}:3)"


def test_a_file_that_is_no_yaml(folder: Path) -> None:
    file = write(folder, "# @package _global_\nbatch: [1\n")
    found = only_mistake(["experiment=mine"], config_dir=folder)
    assert f"{file} must be valid YAML" in found and f"({file}:3)" in found


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "--config-dir must name an existing folder" in only_mistake([], config_dir=tmp_path / "nothing")
