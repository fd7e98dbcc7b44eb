"""The keys of processes of rewards, from a config to what the processes do."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rlscale.config import DataConfig, RewardConfig
from rlscale.driver.open_rewards import open_rewards
from rlscale.driver.prepared_run import PreparedRun
from rlscale.rewards import prepare_reward
from rlscale.types import Failure, Sample

MODULE = """
import asyncio, os, time
from pathlib import Path

FOLDER = Path.cwd()
OPEN = set()


def late(sample):
    with open(FOLDER / "attempts", "a") as file: file.write("x")
    time.sleep(100)


def by_process(sample):
    (FOLDER / f"{os.getpid()}.pid").touch()
    # Two samples are scored at the same time only in two processes.
    while len(list(FOLDER.glob("*.pid"))) < sample.prompt.metadata["processes"]: time.sleep(0.01)
    return float(os.getpid())


async def together(sample):
    OPEN.add(sample.index)
    most = len(OPEN)
    for _ in range(20):
        await asyncio.sleep(0)
        most = max(most, len(OPEN))
    OPEN.discard(sample.index)
    return float(most)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards_of_keys.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def score(name: str, samples: list[Sample], **keys: float) -> dict[int, Failure]:
    reward = RewardConfig(custom_path=f"rewards_of_keys:{name}", **keys)  # type: ignore[arg-type]
    config = SimpleNamespace(reward=reward, data=DataConfig())
    prepared = SimpleNamespace(config=config, reward=prepare_reward(reward), eval_sets=())
    with open_rewards(cast(PreparedRun, prepared), None) as rewards:
        assert rewards is not None
        return asyncio.run(rewards.training.score(samples))


def test_a_late_call_fails_and_is_repeated(folder: Path, make_sample: Callable[..., Sample]) -> None:
    failures = score("late", [make_sample("a")], timeout_s=1.0, max_retries=1)
    assert "did not return within reward.timeout_s=1" in failures[0].message
    assert (folder / "attempts").read_text() == "xx"


@pytest.mark.parametrize("number", [1, 2])
def test_max_workers_processes_score_samples(make_sample: Callable[..., Sample], number: int) -> None:
    samples = [make_sample("a", index=i) for i in range(6)]
    for sample in samples:
        sample.prompt.metadata["processes"] = number
    assert score("by_process", samples, max_workers=number) == {}
    assert len({sample.reward for sample in samples}) == number


@pytest.mark.parametrize("limit", [1, 3])
def test_max_concurrency_coroutines_run_at_once(make_sample: Callable[..., Sample], limit: int) -> None:
    samples = [make_sample("a", index=i) for i in range(9)]
    assert score("together", samples, max_concurrency=limit) == {}
    assert max(sample.reward or 0.0 for sample in samples) == limit
