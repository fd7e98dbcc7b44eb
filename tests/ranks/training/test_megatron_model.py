"""Models of Megatron-core on two ranks, in every parallel layout, compared with transformers on one rank."""

from typing import Any

import pytest

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_families import CONFIGS, write_families
from tests.ranks.training.megatron_model_ranks import BRIDGED_CASES, CASES, LENGTHS


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of two ranks, which run once for all tests of this module."""
    models, folder = tmp_path_factory.mktemp("families"), tmp_path_factory.mktemp("reports")
    write_families(models)
    run_ranks("tests.ranks.training.megatron_model_ranks", str(models), str(folder), timeout_s=300)
    return [report(folder, rank) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_logprobs_and_gradients_are_those_of_transformers(name: str, reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert found[name]["logprobs"] < 1e-5
        assert found[name]["grads"] < 1e-5
    _, sizes = CASES[name]
    lengths = [[max(each)] * 2 for each in LENGTHS] if name.endswith("rows") else LENGTHS
    num_tokens = sum(n - 1 for each in lengths for n in each)
    divides_tokens = "tensor_model_parallel_size" not in sizes and "pipeline_model_parallel_size" not in sizes
    counts = [found[name]["tokens"] for found in reports]
    if "pipeline_model_parallel_size" in sizes:
        assert counts == [0, num_tokens]  # only the last stage has logprobs
    elif divides_tokens:
        assert sum(counts) == num_tokens
    else:
        assert counts == [num_tokens, num_tokens]


@pytest.mark.parametrize("name", CASES)
def test_exported_weights_equal_loaded_ones_in_every_layout(name: str, reports: list[dict[str, Any]]) -> None:
    assert all(found[name]["exported"] for found in reports)


@pytest.mark.parametrize("family", CONFIGS)
def test_conversion_of_every_family_round_trips_bitwise(family: str, reports: list[dict[str, Any]]) -> None:
    assert all(found["converted"][family] for found in reports)


def test_checkpoints_in_the_folder_layout_of_megatron_lm_are_read(reports: list[dict[str, Any]]) -> None:
    assert all(found["megatron-lm"] for found in reports)


def test_a_trainer_starts_from_torch_dist_weights(reports: list[dict[str, Any]]) -> None:
    assert all(found["started"] for found in reports)


@pytest.mark.parametrize("name", BRIDGED_CASES)
def test_mbridge_gives_the_same_bytes(name: str, reports: list[dict[str, Any]]) -> None:
    assert all(found[name]["bridged"] for found in reports)
