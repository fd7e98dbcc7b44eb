"""Further families of Megatron-core on two ranks, compared with transformers on one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_families import NEWER, write_families
from tests.ranks.training.megatron_family_ranks import (
    CASES,
    COMBINED,
    COMBINED_MTP,
    MTP_CASES,
    NIGHTLY,
    TRAINED,
    TRAINED_SINKS,
)
from tests.ranks.training.megatron_mtp import write_mtp_models

SINKS = tuple(name for name in CASES if name.startswith("gpt_oss") and name not in COMBINED)
REST = tuple(name for name in (*CASES, *MTP_CASES) if name not in (*COMBINED, *COMBINED_MTP, *SINKS))


def compare(names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """The reports of two ranks that compute these cases."""
    models, reports = folder / "models", folder / "reports"
    reports.mkdir()
    write_families(models, NEWER)
    write_mtp_models(models / "mtp")
    run_ranks("tests.ranks.training.megatron_family_ranks", str(models), str(reports), *names, timeout_s=500)
    return [report(reports, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases of every change, which run once for all tests."""
    return compare((*COMBINED, *COMBINED_MTP, TRAINED), tmp_path_factory.mktemp("combined"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All other layouts."""
    return compare(REST, tmp_path_factory.mktemp("rest"))


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All other layouts of gpt-oss, and its training."""
    return compare((*SINKS, *TRAINED_SINKS), tmp_path_factory.mktemp("sinks"))


def assert_equal(name: str, reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert found[name]["logprobs"] < 1e-5
        assert found[name]["grads"] < 1e-5
        assert found[name]["exported"]
        assert found[name].get("bridged") is (None if name.startswith(("gpt_oss", "minimax_m2")) else True)
    assert any(found[name]["tokens"] for found in reports)


@pytest.mark.parametrize("name", COMBINED)
def test_a_family_is_that_of_transformers(name: str, combined: list[dict[str, Any]]) -> None:
    assert_equal(name, combined)


@pytest.mark.parametrize("family", [family for family in NEWER if family not in NIGHTLY])
def test_conversion_of_a_family_round_trips_bitwise(family: str, combined: list[dict[str, Any]]) -> None:
    assert all(found[family] for found in combined)


def assert_formula(name: str, reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert found[name]["loss"] < 1e-5 and found[name]["grads"] < 1e-5
        assert found[name]["others"] == 0  # the loss reaches no other parameter
        assert found[name]["exported"] and found[name]["complete"]


@pytest.mark.parametrize("name", COMBINED_MTP)
def test_loss_of_multi_token_prediction_is_that_of_the_formula(name: str, combined: list[dict[str, Any]]) -> None:
    assert_formula(name, combined)


def test_multi_token_prediction_is_frozen_or_trained_without_changing_the_policy(
    combined: list[dict[str, Any]],
) -> None:
    for found in combined:
        assert all(found[TRAINED].values()), found[TRAINED]


@pytest.mark.nightly
@pytest.mark.parametrize("name", REST)
def test_every_layout_is_that_of_transformers(name: str, rest: list[dict[str, Any]]) -> None:
    (assert_formula if name in MTP_CASES else assert_equal)(name, rest)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SINKS)
def test_every_layout_with_sinks_is_that_of_transformers(name: str, sinks: list[dict[str, Any]]) -> None:
    assert_equal(name, sinks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINED_SINKS)
def test_training_with_sinks_equals_that_of_fsdp_and_resumes(name: str, sinks: list[dict[str, Any]]) -> None:
    for found in (each[name] for each in sinks):
        assert found["other names"] == []
        assert max(found["numbers"].values()) < 1e-5, found["numbers"]
        assert max(found["weights"].values()) < 1e-5, found["weights"]
        assert all(found["resumed"].values()) and found["resharded"] < 1e-5, found


@pytest.mark.nightly
@pytest.mark.parametrize("family", NIGHTLY)
def test_conversion_of_a_family_with_known_layers_round_trips_bitwise(family: str, rest: list[dict[str, Any]]) -> None:
    assert all(found[family] for found in rest)
