"""Composing the options once per process gives what Hydra composes for every command line."""

import os
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlscale.config.hydra import compose as composing
from rlscale.config.hydra.compose import compose, compose_app, make_loader
from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders
from rlscale.config.hydra.overrides import parse_command_line

FOLDERS = ConfigFolders.find()


def values_of_hydra(overrides: list[str]) -> dict[str, Any]:
    values = OmegaConf.to_container(make_loader(FOLDERS).load_configuration(PRIMARY, overrides, RunMode.RUN))
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items() if name != "hydra"}


COMMAND_LINES: dict[str, list[str]] = {
    "no key": [],
    "experiment": ["experiment=qwen3_4b_grpo"],
    "options": ["algo=gspo", "train=megatron", "+on=one_gpu"],
    "scalars": ["algo.eps_clip=0.3", "optim.lr=1e-5", "data.num_rollout=7", "train.gradient_checkpointing=true"],
    "null": ["algo.eps_clip_high=null"],
    "list": ["rollout.stop=[a,'b c',\"d\"]"],
    "quoted": ["data.input_key='a b'", 'data.label_key="1"'],
    "twice": ["algo.eps_clip=0.3", "algo.eps_clip=0.4"],
    "mapping": ["train.env_vars={A: 1, B: x}"],
    "entry of a mapping": ["train.env_vars.A=1"],
    "interpolation": ["algo.eps_clip_high=${algo.eps_clip}"],
    "nested": ["eval.sets={a: {path: data/x.jsonl}}"],
    "passthrough": ["sglang.mem_fraction_static=0.5", "megatron.num_experts=8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_values_equal_those_of_hydra(name: str) -> None:
    line = parse_command_line(COMMAND_LINES[name], FOLDERS.groups())
    composed = compose(line.overrides, command_line_keys=line.keys, folders=FOLDERS)
    if composed.read is None:
        assert composed.values == values_of_hydra(line.overrides)
    else:
        pytest.fail(f"Hydra must compose {COMMAND_LINES[name]}")


def test_options_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ConfigFolders] = []
    original = composing.make_loader
    monkeypatch.setattr(composing, "make_loader", lambda folders: loaded.append(folders) or original(folders))
    composing._compose_options.cache_clear()
    for rollouts in (1, 2, 3):
        line = parse_command_line(["experiment=quickstart", f"data.num_rollout={rollouts}"], FOLDERS.groups())
        composed = compose(line.overrides, command_line_keys=line.keys, folders=FOLDERS)
        assert composed.values["data"]["num_rollout"] == rollouts
    assert len(loaded) == 1


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    for number in (3, 4):
        file.write_text(f"# @package _global_\ndata:\n  num_rollout: {number}\n")
        os.utime(file, ns=(number, number))
        folders = ConfigFolders.find(tmp_path)
        line = parse_command_line(["experiment=mine"], folders.groups())
        composed = compose(line.overrides, command_line_keys=line.keys, folders=folders)
        assert composed.values["data"]["num_rollout"] == number


def test_a_composed_config_can_be_changed_without_changing_the_next() -> None:
    line = parse_command_line(["experiment=quickstart"], FOLDERS.groups())
    first = compose(line.overrides, command_line_keys=line.keys, folders=FOLDERS)
    first.values["data"]["num_rollout"] = -1
    second = compose(line.overrides, command_line_keys=line.keys, folders=FOLDERS)
    assert second.values["data"]["num_rollout"] != -1


SETS_HYDRA = {
    "a key": "hydra:\n  verbose: true\n",
    "an option": "defaults:\n  - override /hydra/launcher: basic\n",
}


@pytest.mark.parametrize("name", SETS_HYDRA)
@pytest.mark.slow
def test_a_file_that_sets_something_of_hydra_is_composed_with_its_configs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{SETS_HYDRA[name]}data:\n  num_rollout: 3\n", encoding="utf-8")
    folders = ConfigFolders.find(tmp_path)
    assert compose_app(make_loader(folders), ["+experiment=quickstart"]) is not None
    assert compose_app(make_loader(folders), ["+experiment=mine"]) is None
    assert compose_app(make_loader(folders), ["+experiment=quickstart", "hydra/launcher=joblib"]) is None
    line = parse_command_line(["experiment=mine"], folders.groups())
    composed = compose(line.overrides, command_line_keys=line.keys, folders=folders)
    assert composed.read is None and composed.values == {"data": {"num_rollout": 3}}
    assert composed.origin("data.num_rollout").endswith("mine.yaml:5")
