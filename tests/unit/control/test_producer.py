"""Generation concurrent with training: staleness bound, kinds of update, back-pressure, evaluation, dropped groups."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rlscale.errors import StalenessError, WeightSyncError
from tests.unit.control.simulation import NUM_PROMPTS, simulation, wait_iterations


def long_tailed(index: int) -> int:
    return 40 if index % 4 == 0 else 2


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition; the time limit of the test ends a wait that is too long."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
async def test_every_group_is_trained_once_within_the_bound(tmp_path: Path, staleness: int, drain: bool) -> None:
    with simulation(tmp_path, staleness=staleness, num_rollouts=8, drain=drain, length=long_tailed) as run:
        progress = await run.loop.run()
    assert run.trained_groups == list(range(8 * NUM_PROMPTS))
    assert progress.version == 8
    assert min(run.ages) >= 0
    assert max(run.ages) <= staleness
    assert staleness == 0 or max(run.ages) > 0, "no rollout was made ahead"
    for step, each in enumerate(run.trainers.history):
        ages = [each.version - v for sample in each.versions for v in sample]
        assert run.sink.logged[step]["staleness/max"] == max(ages)
        assert run.sink.logged[step]["staleness/mean"] == pytest.approx(sum(ages) / len(ages))


async def test_in_flight_updates_leave_samples_of_several_versions(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=2, length=long_tailed, train_iterations=4) as run:
        await run.loop.run()
    assert any(" with 0 running" not in line for line in run.engine.log if line.startswith("sync"))
    assert any(len(set(sample)) > 1 for each in run.trainers.history for sample in each.versions)


async def test_updates_at_the_boundary_leave_one_version_a_sample(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=2, length=long_tailed, train_iterations=4, drain=True) as run:
        await run.loop.run()
    assert all(line.endswith(" with 0 running") for line in run.engine.log if line.startswith("sync"))
    assert all(len(set(sample)) == 1 for each in run.trainers.history for sample in each.versions)
    assert max(run.ages) > 0


@pytest.mark.parametrize("staleness", [1, 3])
async def test_a_full_queue_makes_the_producer_wait(tmp_path: Path, staleness: int) -> None:
    with simulation(tmp_path, staleness=staleness, num_rollouts=20) as run:
        run.trainers.hold = asyncio.Event()
        task = asyncio.create_task(run.loop.run())
        await until(lambda: "train 0" in run.engine.log and run.loop._producer.num_ready == staleness)
        await wait_iterations(300)
        # The rollout in training, and `staleness` more.
        assert run.prompts.position == (1 + staleness) * NUM_PROMPTS
        run.trainers.hold.set()
        await task
    assert run.sink.logged[1]["queue/length"] == staleness
    # It was finished before the first rollout was trained.
    assert run.sink.logged[1]["queue/age_s"] > 0
    assert run.sink.logged[1]["time/rollout_wait_s"] > 0
    assert run.sink.logged[1]["time/trainer_wait_s"] >= 0


async def test_the_stop_reward_ends_the_run_a_rollout_later_and_saves(tmp_path: Path) -> None:
    with simulation(
        tmp_path, staleness=2, num_rollouts=50, eval_prompts=1, eval_interval=2, stop_reward=1.0, save_interval=99
    ) as run:
        progress = await run.loop.run()
    assert progress.stopped
    assert progress.next_rollout == 1
    assert progress.evaluated_version == 1


async def test_an_evaluation_that_needs_a_dead_engine_is_repeated_with_the_next_weights(tmp_path: Path) -> None:
    class Restarter:
        """Restarts the engine at the next update: until then the trainers have no weights for it."""

        def is_down(self, index: int) -> bool:
            return False

        async def is_dead(self, index: int) -> bool:
            return await self.recover(index)

        async def recover(self, index: int) -> bool:
            before = run.engine.version
            while run.engine.version == before:
                await wait_iterations(1)
            return True

    with simulation(tmp_path, staleness=1, num_rollouts=3, eval_prompts=1, eval_interval=3, eval_versions=1) as run:
        run.pool.set_handler(Restarter())
        run.engine.fails_for = "eval-held_out-0"
        progress = await run.loop.run()
    assert run.trained_groups == list(range(3 * NUM_PROMPTS))
    assert progress.evaluated_version == 3
    assert progress.first_eval == 1.0
    assert [line for line in run.engine.log if line.startswith("eval")] == [
        "eval-held_out-0 v0", "eval-held_out-0 v1", "eval-held_out-0 v3",
    ]  # fmt: skip


@pytest.mark.parametrize(("interval", "staleness"), [(2, 1), (3, 2), (2, 4), (3, 4)])
async def test_weights_are_sent_at_the_interval(tmp_path: Path, interval: int, staleness: int) -> None:
    with simulation(tmp_path, staleness=staleness, num_rollouts=8, update_interval=interval) as run:
        await run.loop.run()
    sent = [int(line.split()[1][1:]) for line in run.engine.log if line.startswith("sync")]
    assert sent == [*range(interval, 8, interval), 8]
    assert run.trained_groups == list(range(8 * NUM_PROMPTS))
    assert max(run.ages) <= staleness


async def test_an_evaluation_has_the_weights_of_its_step_with_every_interval(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=3, num_rollouts=6, update_interval=4, eval_prompts=1, eval_interval=3) as run:
        await run.loop.run()
    assert [line.split()[-1] for line in run.engine.log if line.startswith("eval")] == ["v0", "v3", "v6"]


async def test_an_engine_that_dies_between_two_updates_gets_an_early_one(tmp_path: Path) -> None:
    class Restarter:
        def is_down(self, index: int) -> bool:
            return False

        async def is_dead(self, index: int) -> bool:
            return await self.recover(index)

        async def recover(self, index: int) -> bool:
            before = run.engine.version
            while run.engine.version == before:
                await wait_iterations(1)
            return True

    with simulation(tmp_path, staleness=2, num_rollouts=6, update_interval=3) as run:
        run.pool.set_handler(Restarter())
        run.engine.fails_for = f"train-{2 * NUM_PROMPTS}"
        await run.loop.run()
    assert run.trained_groups == list(range(6 * NUM_PROMPTS))
    assert any(line.startswith("sync v2") for line in run.engine.log)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_aborted_groups_are_generated_again_and_counted(tmp_path: Path, staleness: int) -> None:
    with simulation(tmp_path, staleness=staleness, num_rollouts=3) as run:
        run.engine.aborts_next = 1
        await run.loop.run()
    assert run.trained_groups == list(range(3 * NUM_PROMPTS))
    assert len([line for line in run.engine.log if line.startswith("train-")]) == 3 * NUM_PROMPTS + 1
    if staleness:
        assert sum(metrics["staleness/dropped_groups"] for metrics in run.sink.logged.values()) == 1


async def test_syncs_for_engines_that_restart_may_abort_a_group_often(tmp_path: Path) -> None:
    """With `rollout.pause_mode=abort`: their number has nothing to do with that of the updates."""
    with simulation(tmp_path, num_rollouts=2) as run:
        run.engine.aborts_next = 5 * NUM_PROMPTS
        await run.loop.run()
    assert run.trained_groups == list(range(2 * NUM_PROMPTS))


async def test_a_group_that_is_always_aborted_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=1) as run:
        run.engine.aborts_next = 10**6
        with pytest.raises(BaseExceptionGroup) as caught:
            await run.loop.run()
    errors = caught.value.subgroup(StalenessError)
    assert errors is not None
    assert "sample 0 was aborted" in str(errors.exceptions[0].exceptions[0])  # type: ignore[attr-defined]


async def test_an_engine_that_keeps_old_weights_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=1) as run:
        run.engine.keeps_version = True
        with pytest.raises(BaseExceptionGroup) as caught:
            await run.loop.run()
    errors = caught.value.subgroup(WeightSyncError)
    assert errors is not None
    assert "engine 0 must generate with weight versions from 1, got [0]" in str(errors.exceptions[0].exceptions[0])  # type: ignore[attr-defined]
