"""Checks of model paths and hub ids, compared with huggingface_hub."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from rlscale.architectures.hf_config import local_model_folder
from rlscale.errors import ConfigError, Problem
from rlscale.models.model_path import check_model_path, check_offline, error_of_argument

CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CACHE_VARIABLES, *OFFLINE_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "values",
    [
        {"HF_HUB_CACHE": "a"},
        {"HUGGINGFACE_HUB_CACHE": "a", "HF_HOME": "b"},
        {"HF_HOME": "b"},
        {"XDG_CACHE_HOME": "c"},
        {"HF_HUB_CACHE": "$TEST_PLACE/a"},
    ],
)
def test_the_cache_is_that_of_huggingface_hub(
    values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: value if value.startswith("$") else str(tmp_path / value) for name, value in values.items()}
    # Its constants are computed at the import, from the environment of that time.
    with monkeypatch.context() as patch:
        for name, value in {**given, "TEST_PLACE": str(tmp_path)}.items():
            patch.setenv(name, value)
        source = Path(huggingface_hub.constants.__file__)
        constants: dict[str, Any] = {"__name__": "constants", "__file__": str(source)}
        exec(compile(source.read_text(), str(source), "exec"), constants)
        snapshot = Path(constants["HF_HUB_CACHE"]) / "models--some--model" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        assert local_model_folder("some/model") == snapshot


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, None),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=1"),
        ({"TRANSFORMERS_OFFLINE": "yes"}, "TRANSFORMERS_OFFLINE=yes"),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, None),
        ({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE=1"),
    ],
)
def test_a_hub_id_without_a_network(
    values: dict[str, str], named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    problems = check_offline("some/model", name="SOURCE")
    assert [named in each.rule for each in problems if named] == ([True] if named else [])
    assert check_model_path("some/model", name="SOURCE") == problems


@pytest.mark.parametrize("given", ["/nope", "./nope", "nope", "a/b/c"])
def test_a_path_that_does_not_exist(given: str) -> None:
    (problem,) = check_model_path(given, name="--model-path")
    assert str(problem) == f"--model-path must name an existing folder or a hub id, got {given!r}; e.g. Qwen/Qwen3-4B"


def test_an_error_of_a_run_names_the_argument() -> None:
    problems = [
        Problem(path="model.hf_checkpoint", rule="be x", value="1", fix="y"),
        Problem(path="a", rule="b", value="2"),
    ]
    text = error_of_argument(ConfigError(problems), name="SOURCE")
    assert text.splitlines() == ["SOURCE must be x, got 1; y", "SOURCE must b, got 2"]
