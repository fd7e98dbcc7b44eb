"""All roles on two ranks with offloading, compared with one rank without: the same metrics."""

from pathlib import Path

import pytest

from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from tests.ranks.training.fsdp_role_ranks import (
    NUM_ROLLOUTS,
    SAVED_AFTER,
    all_roles,
    critic_of,
    distilled,
    train,
    value,
)
from tests.ranks.training.launch import report, run_ranks
from tests.unit.training.rollouts import tiny_model

pytestmark = pytest.mark.usefixtures("world")
ONE_RANK = [[[*range(8)]]]


@pytest.fixture(scope="module")
def other(cache: Path) -> str:
    return tiny_model(cache, seed=1)


@pytest.fixture(scope="module")
def folder(model_path: str, other: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("roles")
    for name in ("saved", "critic_saved"):
        (folder / name).mkdir()
    run_ranks("tests.ranks.training.fsdp_role_ranks", model_path, other, str(folder))
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str, other: str) -> list[dict[str, float]]:
    backend = FsdpBackend(all_roles(model_path, other), rank=0, world_size=1)
    return [train(backend, version, ONE_RANK) for version in range(NUM_ROLLOUTS)]


def test_two_ranks_report_the_metrics_of_one(folder: Path, alone: list[dict[str, float]]) -> None:
    assert report(folder, 0) == report(folder, 1)
    for two, one in zip(report(folder, 0)["rollouts"], alone, strict=True):
        assert {"critic_loss", "rollout/kl", "rollout/teacher_kl", "rollout/return"} <= one.keys()
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4)


def test_the_divergence_from_a_teacher_on_two_ranks_is_that_of_one(folder: Path, model_path: str, other: str) -> None:
    for kind, two in zip(("top_k", "full"), report(folder, 0)["distilled"], strict=True):
        one = train(FsdpBackend(distilled(model_path, other, kind), rank=0, world_size=1), 0, ONE_RANK)
        assert one["teacher_kl"] > 1e-3 and two == pytest.approx(one, abs=1e-5, rel=1e-4)


def test_two_ranks_resume_bit_for_bit(folder: Path) -> None:
    assert report(folder, 0)["resumed_exactly"] and report(folder, 1)["resumed_exactly"]


def test_a_checkpoint_of_two_ranks_loads_on_one(
    folder: Path, model_path: str, other: str, alone: list[dict[str, float]]
) -> None:
    backend = FsdpBackend(all_roles(model_path, other), rank=0, world_size=1)
    backend.load(folder / "saved")
    assert train(backend, SAVED_AFTER, ONE_RANK) == pytest.approx(alone[SAVED_AFTER], abs=1e-5, rel=1e-4)


def test_a_critic_on_two_dedicated_ranks_equals_one_on_one_rank(folder: Path, model_path: str) -> None:
    # The critic's ranks are a separate world: the policy's ranks depend only on the columns that they exchange.
    alone = FsdpCriticBackend(critic_of(model_path, number=1), rank=0, world_size=1)
    expected = [value(alone, version, ONE_RANK) for version in range(NUM_ROLLOUTS)]
    assert report(folder, 0)["valued"] == report(folder, 1)["valued"]
    for two, one in zip(report(folder, 0)["valued"], expected, strict=True):
        assert two.pop("values") == pytest.approx(one.pop("values"), abs=1e-5, rel=1e-4)
        assert one["critic_loss"] > 0 and two == pytest.approx(one, abs=1e-5, rel=1e-4)
    moved = FsdpCriticBackend(critic_of(model_path, number=1), rank=0, world_size=1)
    moved.load(folder / "critic_saved")
    again = value(moved, SAVED_AFTER, ONE_RANK)
    again.pop("values")
    assert again == pytest.approx(expected[SAVED_AFTER], abs=1e-5, rel=1e-4)
