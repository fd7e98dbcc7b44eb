"""The key `custom`, the file merged into it, and the user functions that receive it."""

from pathlib import Path
from typing import Any

import pytest

from rlscale.config import load_config
from rlscale.config.groups.custom import with_custom
from tests.unit.config.config_errors import config_errors, only_error


def file(folder: Path, text: str) -> str:
    path = folder / "custom.yaml"
    path.write_text(text, encoding="utf-8")
    return f"custom_config_path={path}"


def test_values_of_any_name_and_depth_are_kept() -> None:
    config = load_config(["custom.max_turns=5", "custom.tools.search={url: x, limit: 3}"])
    assert config.custom == {"max_turns": 5, "tools": {"search": {"url": "x", "limit": 3}}}
    assert load_config([]).custom == {}


def test_the_file_is_merged_and_the_command_line_wins(tmp_path: Path) -> None:
    word = file(tmp_path, "max_turns: 5\ntools: {search: {url: a}, shell: true}\n")
    assert load_config([word]).custom == {"max_turns": 5, "tools": {"search": {"url": "a"}, "shell": True}}
    typed = load_config([word, "custom.max_turns=9", "custom.tools.search.url=b", "custom.new.deep=1"])
    assert typed.custom == {
        "max_turns": 9,
        "tools": {"search": {"url": "b"}, "shell": True},
        "new": {"deep": 1},
    }


def test_the_file_wins_over_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [quickstart, _self_]\ncustom: {max_turns: 2, kept: yes}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    words = ["experiment=mine", file(tmp_path, "max_turns: 5\n")]
    assert load_config(words, config_dir=tmp_path).custom == {"max_turns": 5, "kept": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "custom_config_path must name a YAML file with a mapping, got"),
        ("", "custom_config_path must name a YAML file with a mapping, got"),
        ("a: [", "custom_config_path must name a readable YAML file, got"),
        ("a: " + "[" * 2000, "custom_config_path must name a readable YAML file, got"),
        ("a: &a [*a]", "custom_config_path must name a readable YAML file, got"),
        ("a: !!binary aGVsbG8=", "custom_config_path must name a readable YAML file, got"),
        ("a: " + "9" * 5000, "custom_config_path must name a readable YAML file, got"),
        ("a: 1\na: 2", "custom_config_path must name a readable YAML file, got"),
    ],
)
def test_a_file_without_a_mapping_is_reported(tmp_path: Path, text: str, message: str) -> None:
    found = only_error([file(tmp_path, text)])
    assert found.startswith(message) and found.endswith(" (command line)")


def test_values_of_the_file_are_those_of_an_option(tmp_path: Path) -> None:
    found = load_config([file(tmp_path, "rate: 1e-5\nday: 2026-11-26\nother: 2026-13-45\n")]).custom
    assert found == {"rate": 1e-5, "day": "2026-11-26", "other": "2026-13-45"}


def test_a_missing_file_is_reported_with_the_other_errors(tmp_path: Path) -> None:
    found = config_errors(f"custom_config_path={tmp_path}/none.yaml", "optim.lr=-1")
    assert {text.split(" ")[0] for text in found} == {"custom_config_path", "optim.lr"}
    assert "No such file" in next(text for text in found if text.startswith("custom"))


def test_a_function_with_the_parameter_receives_the_values() -> None:
    def wants(sample: int, custom: dict[str, Any]) -> Any:
        return sample, custom["a"]

    def wants_by_name(sample: int, *, custom: dict[str, Any]) -> Any:
        return sample, custom["a"]

    def wants_not(sample: int) -> Any:
        return sample

    assert with_custom(wants, {"a": 1})(5) == (5, 1)
    assert with_custom(wants_by_name, {"a": 1})(5) == (5, 1)
    assert with_custom(wants_not, {"a": 1}) is wants_not
    assert with_custom(max, {"a": 1}) is max  # does not tell its parameters
