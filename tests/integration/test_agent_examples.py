"""The agent examples learn: held-out success starts low and at least doubles."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.store_starts import DIGESTS, START_FOLDER, STARTS, Start
from tests.benchmark_scripts import benchmark_script

NAMES = ("calculator", "search", "code", "guess", "framework_agent", "two_agents")


@pytest.fixture(scope="module")
def examples() -> Iterator[ModuleType]:
    with benchmark_script("agent_examples") as module:
        yield module


def test_the_list_is_complete(examples: ModuleType) -> None:
    assert set(examples.EXAMPLES) == set(NAMES)


def test_the_stored_weights_are_those_of_todays_warm_ups() -> None:
    assert json.loads(DIGESTS.read_text()) == {name: each.digest for name, each in STARTS.items()}, (
        "see scripts/store_starts.py"
    )
    assert {Start(experiment=name).warmup for name in STOP_REWARDS} <= set(STARTS)


STOP_REWARDS = {"calculator": 0.6, "search": 0.75, "code": 0.6, "guess": 0.7, "framework_agent": 0.6, "two_agents": 0.5}
"""Held-out success of the runs in CI: at least twice that of the start.

They start from the stored weights of the warm-ups (`scripts/store_starts.py`). Nightly all examples make their warm-up
and run until the success that their experiments ask for.
"""


@pytest.fixture
def example_cache(shared: Path, name: str) -> Iterator[Path]:
    """A cache for the examples of all workers: two runs with one warm-up wait until the first of them has made it."""
    folder = shared / "agent_examples"
    folder.mkdir(exist_ok=True)
    warmup = Start(experiment=name).warmup
    with (folder / f"{warmup}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(folder.glob(f"warmups/{warmup}-*/finished.json")):
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield folder


def run_example_once(examples: ModuleType, name: str, cache: Path, folder: Path, ray: str) -> dict[str, Any]:
    """Result of an example as its experiment is. The first test of a session that needs it runs it, in any worker.

    Args:
        cache: an `example_cache`, which gets the result.
        folder: of the run, if this is the first test.
        ray: the address of a Ray.
    """
    stored = cache / f"{name}.json"
    with stored.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stored.exists():
            result = examples.run(name, folder, env={"RLSCALE_CACHE": str(cache), "RAY_ADDRESS": ray})
            stored.write_text(json.dumps(result))
        return dict(json.loads(stored.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", STOP_REWARDS)
def test_held_out_success_doubles(examples: ModuleType, name: str, tmp_path: Path, shared_ray: str) -> None:
    # Agents leave most rows of the engine empty, which it computes only where bits must not depend on them.
    overrides = [f"checkpoint.load={START_FOLDER / Start(experiment=name).warmup}", "rollout.deterministic=false"]
    overrides += ["eval.interval=6", "eval.max_examples=100", f"eval.stop_reward={STOP_REWARDS[name]}"]
    result = examples.run(name, tmp_path, overrides=overrides, env={"RAY_ADDRESS": shared_ray})
    assert examples.learns(result), result["held_out"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(
    examples: ModuleType, name: str, example_cache: Path, tmp_path: Path, shared_ray: str
) -> None:
    result = run_example_once(examples, name, example_cache, tmp_path, shared_ray)
    assert examples.learns(result), result["held_out"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns_with_other_seeds(
    examples: ModuleType, name: str, seed: int, example_cache: Path, tmp_path: Path, shared_ray: str
) -> None:
    env = {"RLSCALE_CACHE": str(example_cache), "RAY_ADDRESS": shared_ray}
    assert examples.learns(examples.run(name, tmp_path, seed=seed, env=env))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["calculator", "search", "code"])
def test_tools_are_better_than_none(
    examples: ModuleType, name: str, example_cache: Path, tmp_path: Path, shared_ray: str
) -> None:
    with_tools = run_example_once(examples, name, example_cache, tmp_path / "tools", shared_ray)
    env = {"RLSCALE_CACHE": str(example_cache), "RAY_ADDRESS": shared_ray}
    without = examples.run(name, tmp_path / "plain", overrides=examples.EXAMPLES[name].without_tools, env=env)
    assert with_tools["held_out"][-1][1] > without["held_out"][-1][1] + 0.1
