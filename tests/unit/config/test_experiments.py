"""Every YAML file loads, and what the user typed wins over every experiment and overlay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlscale.config import Loaded, load_config, load_config_with_notes
from rlscale.config.compose import compose
from rlscale.config.folder import ConfigFolders, packaged_folder
from rlscale.config.overrides import parse_command_line
from rlscale.config.schema import keys
from tests.unit.config.mistakes import mistakes

FOLDERS = ConfigFolders.find()
GROUPS = FOLDERS.groups()
EXPERIMENTS = GROUPS["experiment"]
OPTIONS = [(group, name) for group, names in GROUPS.items() if group not in ("experiment", "on") for name in names]


def composed(*words: str) -> dict[str, Any]:
    """Values as they come out of Hydra, before any rule."""
    line = parse_command_line(words, GROUPS)
    assert line.problems == []
    return compose(line.words, command_line_keys=line.keys, folders=FOLDERS).values


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in keys():
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def body(group: str, name: str) -> dict[str, Any]:
    """What an option's own file sets."""
    text: Any = OmegaConf.to_container(OmegaConf.load(packaged_folder() / group / f"{name}.yaml"))
    text.pop("defaults", None)
    return dict(leaves(text if group in ("experiment", "on") else {group: text}))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_right_as_it_stands(experiment: str) -> None:
    loaded = load_config_with_notes([f"experiment={experiment}"])
    assert loaded.warnings == ()
    assert loaded.config.run.name is not None and loaded.config.run.name.startswith(f"{experiment}-")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("overlay", ["", *GROUPS["on"]])
@pytest.mark.parametrize("turn", range(max(len(GROUPS[group]) for group, _ in OPTIONS)))
def test_a_chosen_option_wins(experiment: str, overlay: str, turn: int) -> None:
    # One option of each group at a time: options of different groups set different keys (the test after the next).
    chosen = {group: GROUPS[group][turn % len(GROUPS[group])] for group, _ in OPTIONS}
    words = [f"{group}={option}" for group, option in chosen.items()]
    words += [f"experiment={experiment}", *([f"on={overlay}"] if overlay else [])]
    values = dict(leaves(composed(*words)))
    for group, option in chosen.items():
        for path, value in body(group, option).items():
            assert values[path] == value, path


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_typed_value_wins_over_experiment_and_overlay(experiment: str) -> None:
    typed = sorted({*body("experiment", experiment), *body("on", "cpu")})
    line = parse_command_line([f"experiment={experiment}", "on=cpu"], GROUPS)
    words = [*line.words, *(f"++{path}=typed" for path in typed)]
    values = dict(leaves(compose(words, command_line_keys=set(typed), folders=FOLDERS).values))
    assert {path: values[path] for path in typed} == dict.fromkeys(typed, "typed")


def test_options_set_keys_of_their_own_group_only() -> None:
    for group, name in OPTIONS:
        assert all(path.startswith(f"{group}.") for path in body(group, name)), (group, name)


@pytest.mark.parametrize(
    "option", [("experiment", name) for name in EXPERIMENTS] + [("on", name) for name in GROUPS["on"]]
)
def test_bodies_set_no_key_that_an_option_sets(option: tuple[str, str]) -> None:
    by_options = {path for group, name in OPTIONS for path in body(group, name)}
    assert not set(body(*option)) & by_options


@pytest.mark.parametrize(
    "path", sorted(packaged_folder().rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_files_set_known_keys_only_and_have_a_comment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    if path.parent.name in GROUPS:
        assert set(body(path.parent.name, path.stem)) <= set(keys())
    assert isinstance(yaml.safe_load(text), dict)


def on_cpu(experiment: str) -> Loaded:
    return load_config_with_notes([f"experiment={experiment}", "on=cpu"])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_on_cpu_makes_any_experiment_small(experiment: str) -> None:
    config = on_cpu(experiment).config
    assert config.cluster.device == "cpu" and config.model.build == "tiny_qwen3" and config.model.hf_checkpoint is None
    assert config.data.num_rollout is not None and config.data.num_rollout <= 50
    assert config.rollout.max_response_len == config.eval.max_response_len == 8
    assert config.algo == load_config([f"experiment={experiment}"]).algo
    assert config.optim == load_config([f"experiment={experiment}"]).optim


def test_an_overlay_may_stand_before_the_experiment() -> None:
    assert load_config(["on=cpu", "experiment=qwen3_4b_grpo"]).run.name == on_cpu("qwen3_4b_grpo").config.run.name


def test_options_that_need_more_say_what() -> None:
    assert mistakes("algo=sft") == [
        "batch.n_samples_per_prompt must be 1 with algo.loss_type=sft_loss, got 8; a prompt has one label; set "
        f"batch.n_samples_per_prompt=1 ({origin('experiment/quickstart.yaml', 'n_samples_per_prompt')})"
    ]
    assert mistakes("algo=sft", "batch.n_samples_per_prompt=1") == []
    assert "add model=hf" in mistakes("model.hf_checkpoint=/m")[0]
    assert mistakes("model=hf", "model.hf_checkpoint=/m") == []


def origin(file: str, name: str) -> str:
    path = packaged_folder() / file
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(f"{name}:"))
    try:
        return f"{path.relative_to(Path.cwd())}:{number}"
    except ValueError:
        return f"{path}:{number}"
