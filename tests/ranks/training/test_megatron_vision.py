"""Models with images on Megatron-core, on two ranks: the logprobs, gradients and weights of transformers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlscale.config import ModelConfig
from rlscale.models.resolve_model import resolve_model
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_vision_ranks import ADAPTED, CASES, CRITICS, QWEN3, STEPPED_BY_MUON, TRAINED
from tests.ranks.training.megatron_vision_roles import adapter_folder
from tests.tiny_vision import SMALL, VISION_BUILDS

SHORT = ("dp2", "tp2 sp", "pp2", "cp2", "qwen2_5_vl tp2")
LONG = [name for name in CASES if name not in SHORT]
NUM_TOKENS = 3 + 3 + 1 + 2 + 2
"""Trainable tokens of the samples."""


def compare(names: Sequence[str], folder: Path) -> Path:
    """The folder of the reports and exports of two ranks that compute these cases."""
    models, reports = folder / "models", folder / "reports"
    reports.mkdir()
    for build in VISION_BUILDS:
        # Four layers: each of two stages has as many as deepstack needs on the first one.
        sizes = SMALL | {"num_layers": 4, "num_key_value_heads": 2} | ({"head_dim": 16} if build == QWEN3 else {})
        shutil.copytree(resolve_model(ModelConfig(build=build, cache_dir=str(folder), **sizes)), models / build)
    run_ranks("tests.ranks.training.megatron_vision_ranks", str(models), str(reports), *names, timeout_s=400)
    return reports


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases of every change, which run once for all tests."""
    return compare(SHORT, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All other layouts."""
    return compare(LONG, tmp_path_factory.mktemp("rest"))


def reports_of(name: str, folder: Path) -> list[dict[str, Any]]:
    return [report(folder, rank)[name] for rank in range(2)]


def assert_equal(name: str, folder: Path) -> None:
    reports = reports_of(name, folder)
    for found in reports:
        assert found["logprobs"] < 1e-5, found
        assert found["grads"] < 1e-5, found
        assert found["round trip"] and found["copies"]
    counts = [found["tokens"] for found in reports]
    expected = {"tp": [NUM_TOKENS] * 2, "cp": [NUM_TOKENS] * 2, "pp": [0, NUM_TOKENS]}.get(
        name.removeprefix("qwen2_5_vl ")[:2]
    )
    assert counts == expected if expected else sum(counts) == NUM_TOKENS


def assert_adapters(name: str, folder: Path) -> None:
    """Asserts that a run with adapters equals that of FSDP2, as does its export."""
    for found in (each["adapters"] for each in reports_of(name, folder)):
        assert found["numbers"] < 1e-5 and found["weights"] < 1e-5, found
        assert found["resumed"] and found["converted"]
    ours, theirs = (adapter_folder(folder, name) / each / "adapter" for each in ("hf", "fsdp"))
    configs = [json.loads((each / "adapter_config.json").read_text()) for each in (ours, theirs)]
    for config in configs:
        config["target_modules"].sort()  # peft keeps a set
    assert configs[0] == configs[1] and {"qkv", "q_proj"} <= set(configs[0]["target_modules"])
    tensors, expected = (load_file(each / "adapter_model.safetensors") for each in (ours, theirs))
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=0, msg=key)
    # Rank 0 gets all weights: those with an A and a B have changed.
    assert len(reports_of(name, folder)[0]["adapters"]["changed"]) == len(tensors) // 2


@pytest.mark.parametrize("name", SHORT)
def test_logprobs_gradients_and_weights_are_those_of_transformers(name: str, short: Path) -> None:
    assert_equal(name, short)


@pytest.mark.parametrize("name", [name for name in TRAINED if name in SHORT])
def test_a_run_resumes_exactly_and_exports_its_weights(name: str, short: Path) -> None:
    for found in reports_of(name, short):
        assert all(found["resumed"].values()), found["resumed"]


@pytest.mark.parametrize("name", [name for name in CRITICS if name in SHORT])
def test_a_critic_equals_that_of_fsdp(name: str, short: Path) -> None:
    assert all(found["critic"] < 1e-5 for found in reports_of(name, short))


@pytest.mark.parametrize("name", [name for name in STEPPED_BY_MUON if name in SHORT])
def test_steps_of_muon_equal_those_of_fsdp(name: str, short: Path) -> None:
    assert all(found["muon"] < 1e-5 for found in reports_of(name, short))


@pytest.mark.parametrize("name", [name for name in ADAPTED if name in SHORT])
def test_adapters_equal_those_of_fsdp(name: str, short: Path) -> None:
    assert_adapters(name, short)


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_conversion_round_trips_bitwise(build: str, short: Path) -> None:
    assert all(found[build] for found in reports_of("converted", short))


@pytest.mark.nightly
@pytest.mark.parametrize("name", LONG)
def test_every_layout_is_that_of_transformers(name: str, rest: Path) -> None:
    assert_equal(name, rest)
    assert all(found.get(key, 0.0) < 1e-5 for found in reports_of(name, rest) for key in ("critic", "muon"))
    if name in TRAINED:
        assert all(all(found["resumed"].values()) for found in reports_of(name, rest))
    if name in ADAPTED:
        assert_adapters(name, rest)
