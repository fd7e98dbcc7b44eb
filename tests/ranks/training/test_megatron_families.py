"""Further families of Megatron-core on two ranks, compared with transformers on one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_families import NEWER, write_families
from tests.ranks.training.megatron_family_ranks import CASES, COMBINED

REST = tuple(name for name in CASES if name not in COMBINED)


def compare(names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """The reports of two ranks that compute these cases."""
    models, reports = folder / "models", folder / "reports"
    reports.mkdir()
    write_families(models, NEWER)
    run_ranks("tests.ranks.training.megatron_family_ranks", str(models), str(reports), *names, timeout_s=500)
    return [report(reports, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases of every change, which run once for all tests."""
    return compare(COMBINED, tmp_path_factory.mktemp("combined"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All other layouts."""
    return compare(REST, tmp_path_factory.mktemp("rest"))


def assert_equal(name: str, reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert found[name]["logprobs"] < 1e-5
        assert found[name]["grads"] < 1e-5
        assert found[name]["exported"]
    assert any(found[name]["tokens"] for found in reports)


@pytest.mark.parametrize("name", COMBINED)
def test_a_family_is_that_of_transformers(name: str, combined: list[dict[str, Any]]) -> None:
    assert_equal(name, combined)


@pytest.mark.parametrize("family", NEWER)
def test_conversion_of_a_family_round_trips_bitwise(family: str, combined: list[dict[str, Any]]) -> None:
    assert all(found[family] for found in combined)


@pytest.mark.nightly
@pytest.mark.parametrize("name", REST)
def test_every_layout_is_that_of_transformers(name: str, rest: list[dict[str, Any]]) -> None:
    assert_equal(name, rest)
