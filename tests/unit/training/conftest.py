"""Fixtures of the trainer tests: a process group of one rank and tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.training.distributed import join_world, leave_world
from tests.unit.training.rollouts import tiny_model


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of this process alone."""
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    yield
    leave_world()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model_path(cache: Path) -> str:
    return tiny_model(cache)
