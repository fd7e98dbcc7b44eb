"""Models with images on Megatron-core, on two ranks: the logprobs, gradients and weights of transformers."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import ModelConfig
from rlscale.models.resolve_model import resolve_model
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_vision_ranks import CASES, QWEN3, TRAINED
from tests.tiny_vision import SMALL, VISION_BUILDS

SHORT = ("dp2", "tp2", "tp2 sp", "pp2", "qwen2_5_vl tp2")
NUM_TOKENS = 3 + 3 + 1 + 2 + 2
"""Trainable tokens of the samples."""


def compare(names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """The reports of two ranks that compute these cases."""
    models, reports = folder / "models", folder / "reports"
    reports.mkdir()
    for build in VISION_BUILDS:
        # Four layers: each of two stages has as many as deepstack needs on the first one.
        sizes = SMALL | {"num_layers": 4, "num_key_value_heads": 2} | ({"head_dim": 16} if build == QWEN3 else {})
        shutil.copytree(resolve_model(ModelConfig(build=build, cache_dir=str(folder), **sizes)), models / build)
    run_ranks("tests.ranks.training.megatron_vision_ranks", str(models), str(reports), *names, timeout_s=400)
    return [report(reports, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases of every change, which run once for all tests."""
    return compare(SHORT, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All other layouts."""
    return compare(tuple(name for name in CASES if name not in SHORT), tmp_path_factory.mktemp("rest"))


def assert_equal(name: str, reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert found[name]["logprobs"] < 1e-5, found[name]
        assert found[name]["grads"] < 1e-5, found[name]
        assert found[name]["round trip"] and found[name]["copies"]
        assert found[name].get("critic", 0.0) < 1e-5
    counts = [found[name]["tokens"] for found in reports]
    expected = {"tp": [NUM_TOKENS] * 2, "pp": [0, NUM_TOKENS]}.get(name.removeprefix("qwen2_5_vl ")[:2])
    assert counts == expected if expected else sum(counts) == NUM_TOKENS


@pytest.mark.parametrize("name", SHORT)
def test_logprobs_gradients_and_weights_are_those_of_transformers(name: str, short: list[dict[str, Any]]) -> None:
    assert_equal(name, short)


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_resumes_exactly_and_exports_its_weights(name: str, short: list[dict[str, Any]]) -> None:
    for found in short:
        assert all(found[name]["resumed"].values()), found[name]["resumed"]


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_conversion_round_trips_bitwise(build: str, short: list[dict[str, Any]]) -> None:
    assert all(found["converted"][build] for found in short)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CASES if name not in SHORT])
def test_every_layout_is_that_of_transformers(name: str, rest: list[dict[str, Any]]) -> None:
    assert_equal(name, rest)
