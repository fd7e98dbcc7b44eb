"""Families with gated delta nets on Megatron-core, on two ranks, compared with transformers on one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_delta_ranks import CASES, FAMILIES, TRAINED
from tests.ranks.training.megatron_families import DELTAS, write_families

SHORT = ("qwen3_next tp2 sp ep2", "qwen3_5 tp2", "qwen3_5 pp2")
REST = tuple(name for name in CASES if name not in SHORT)
SHORT_FAMILIES = tuple(dict.fromkeys(CASES[name][0] for name in SHORT))


def compare(names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """The reports of two ranks that compute these cases."""
    models, reports = folder / "models", folder / "reports"
    reports.mkdir()
    write_families(models, {family: DELTAS[family] for family, _ in (CASES[name] for name in names)})
    run_ranks("tests.ranks.training.megatron_delta_ranks", str(models), str(reports), *names, timeout_s=500)
    return [report(reports, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases of every change, which run once for all tests."""
    return compare(SHORT, tmp_path_factory.mktemp("short"))


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


@pytest.mark.parametrize("name", SHORT)
def test_a_family_is_that_of_transformers(name: str, short: list[dict[str, Any]]) -> None:
    assert_equal(name, short)


@pytest.mark.parametrize("family", SHORT_FAMILIES)
def test_conversion_of_a_family_round_trips_bitwise(family: str, short: list[dict[str, Any]]) -> None:
    assert all(found[family] for found in short)


def assert_steps(names: tuple[str, ...], reports: list[dict[str, Any]]) -> None:
    for found in reports:
        assert all(found[name]["resumed"] for name in names)
        steps = [found[name]["metrics"] for name in names]
        assert all(step == pytest.approx(steps[0], rel=1e-5, abs=1e-7) for step in steps)
        assert all(step["grad_norm"] > 0 for step in steps)


def test_a_run_resumes_exactly(short: list[dict[str, Any]]) -> None:
    assert_steps(("qwen3_5 tp2",), short)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_steps_of_every_layout_are_the_same(family: str, rest: list[dict[str, Any]]) -> None:
    assert_steps(tuple(name for name in TRAINED if CASES[name][0] == family and name in REST), rest)


@pytest.mark.nightly
@pytest.mark.parametrize("name", REST)
def test_every_layout_is_that_of_transformers(name: str, rest: list[dict[str, Any]]) -> None:
    assert_equal(name, rest)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_of_every_family_round_trips_bitwise(family: str, rest: list[dict[str, Any]]) -> None:
    assert all(found[family] for found in rest)
