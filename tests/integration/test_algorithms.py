"""Every algorithm learns: the table of `benchmarks/algorithms.py`, with fewer rollouts."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmark_scripts import benchmark_script

NAMES = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "reinforce",
    "gdpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
    "vapo",
    "custom_loss",
    "sft",
)


@pytest.fixture(scope="module")
def table() -> Iterator[ModuleType]:
    with benchmark_script("algorithms") as module:
        yield module


def test_the_table_is_complete(table: ModuleType) -> None:
    assert set(table.CASES) == set(NAMES)


# They differ in formulas, which have unit tests. `.ci/run` trains the quickstart itself, which is GRPO after SFT.
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_learns(
    table: ModuleType, name: str, cache: Path, warm: Path, tmp_path: Path, shared_ray: str
) -> None:
    start = (f"checkpoint.load={warm}",)
    env = {"RLSCALE_CACHE": str(cache), "RAY_ADDRESS": shared_ray}
    row = table.run(name, tmp_path, num_rollouts=15, overrides=start, env=env)
    assert table.improves(name, row), row
