"""Rollouts that train only the critic: the engines keep their weights, and nothing counts as stale."""

from pathlib import Path
from typing import Any

import pytest

from rlscale.config import AlgoConfig, CriticConfig
from rlscale.config.groups.algo import AdvantageEstimator
from tests.unit.control.simulation import NUM_PROMPTS, simulation

NUM_ONLY = 3


def critic_only(number: int = NUM_ONLY) -> dict[str, Any]:
    return {
        "algo": AlgoConfig(advantage_estimator=AdvantageEstimator.ppo),
        "critic": CriticConfig(num_critic_only_steps=number),
    }


def syncs(log: list[str]) -> list[str]:
    return [line.split(" with")[0] for line in log if line.startswith("sync")]


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_engines_are_updated_only_after_steps_of_the_policy(tmp_path: Path, staleness: int) -> None:
    with simulation(tmp_path, staleness=staleness, groups=critic_only()) as run:
        progress = await run.loop.run()
    assert syncs(run.engine.log) == ["sync v1", "sync v2", "sync v3"]
    assert progress.version == 3 and progress.next_rollout == 6
    assert run.trained_groups == list(range(6 * NUM_PROMPTS))
    # The samples of the unchanged policy are of its version, so they are as fresh as their number says.
    assert [each.version for each in run.trainers.history] == [0, 0, 0, 0, 1, 2]
    assert min(run.ages) >= 0 and max(run.ages) <= staleness


async def test_without_staleness_generation_and_training_still_alternate(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=0, num_rollouts=4, groups=critic_only()) as run:
        await run.loop.run()
    # Engines may share GPUs with the trainer: nothing is generated while the critic trains.
    starts = [i for i, line in enumerate(run.engine.log) if line.startswith("train ")]
    requests = [i for i, line in enumerate(run.engine.log) if line.startswith("train-")]
    assert [sum(request < start for request in requests) for start in starts] == [
        NUM_PROMPTS * (i + 1) for i in range(4)
    ]


async def test_a_run_may_train_only_the_critic(tmp_path: Path) -> None:
    with simulation(tmp_path, num_rollouts=3, eval_interval=1, eval_prompts=1, groups=critic_only(10)) as run:
        progress = await run.loop.run()
    assert syncs(run.engine.log) == [] and progress.version == 0
    assert len(run.trainers.history) == 3
    # One evaluation: the weights are the same in all of them.
    assert sum("eval/reward_mean" in metrics for metrics in run.sink.logged.values()) == 1


async def test_a_run_resumed_between_both_phases_continues_exactly(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=1, num_rollouts=2, save_interval=1, groups=critic_only()) as run:
        await run.loop.run()
        start = run.store.latest()
    assert start is not None
    with simulation(tmp_path, staleness=1, start=start, groups=critic_only()) as run:
        await run.trainers.load(start.folder)
        await run.loop.run()
    assert syncs(run.engine.log) == ["sync v1", "sync v2", "sync v3"]
    assert run.trained_groups == list(range(6 * NUM_PROMPTS))
