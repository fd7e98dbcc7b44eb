"""Runs killed with rollouts ahead: no group is lost or used twice, and the staleness bound holds."""

import asyncio
from pathlib import Path

import pytest

from rlscale.checkpoint.pending_groups import load_groups
from rlscale.control.loop_config import Progress
from tests.unit.control.simulation import NUM_PROMPTS, Prompts, simulation

NUM_ROLLOUTS = 10


def long_tailed(index: int) -> int:
    return 40 if index % 4 == 0 else 2


async def run_and_kill(folder: Path, *, after_trained: int, drain: bool = False) -> list[str]:
    """Kills a run after so many training passes; the log of its engine."""
    with simulation(
        folder, staleness=2, num_rollouts=NUM_ROLLOUTS, save_interval=1, length=long_tailed, drain=drain
    ) as run:
        run.trainers.num_iterations = 60
        task = asyncio.create_task(run.loop.run())
        while len(run.trainers.history) < after_trained or run.store.latest() is None:
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return run.engine.log


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("after_trained", [1, 3, 4, 7])
async def test_a_killed_run_continues_with_every_prompt_once(tmp_path: Path, after_trained: int, drain: bool) -> None:
    await run_and_kill(tmp_path, after_trained=after_trained, drain=drain)
    with simulation(tmp_path, staleness=2, num_rollouts=NUM_ROLLOUTS) as peek:
        start = peek.store.latest()
    assert start is not None
    with simulation(
        tmp_path, staleness=2, num_rollouts=NUM_ROLLOUTS, save_interval=1, start=start, drain=drain, length=long_tailed
    ) as run:
        await run.trainers.load(start.folder)
        trained_before = len(run.trainers.history)
        progress = await run.loop.run()
    assert trained_before == start.rollout_id
    assert run.trained_groups == list(range(NUM_ROLLOUTS * NUM_PROMPTS))
    assert min(run.ages) >= 0 and max(run.ages) <= 2
    assert progress.next_rollout == NUM_ROLLOUTS


async def test_finished_groups_are_reused_and_others_generated_again(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=2, num_rollouts=NUM_ROLLOUTS, save_interval=1) as run:
        run.engine.hangs_for = {"train-7"}  # the second group of rollout 2
        task = asyncio.create_task(run.loop.run())
        while (newest := run.store.latest()) is None or newest.rollout_id < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start = run.store.latest()
    assert start is not None and start.rollout_id == 2
    # Rollouts 2 and 3 are ahead of the trainer: their prompts are drawn, and their groups are in the checkpoint.
    drawn = 4 * NUM_PROMPTS
    assert start.state["source"] == {"prompts": {"position": drawn}, "next_index": drawn}
    assert [group.index for group in load_groups(start.folder)] == list(range(2 * NUM_PROMPTS, drawn))
    with simulation(tmp_path, staleness=2, num_rollouts=NUM_ROLLOUTS, start=start) as again:
        await again.trainers.load(start.folder)
        await again.loop.run()
    requested = [line.split()[0] for line in again.engine.log if line.startswith("train-")]
    assert "train-7" in requested
    assert "train-6" not in requested, "a finished group was generated again"
    assert len(requested) == len(set(requested))
    assert again.trained_groups == list(range(NUM_ROLLOUTS * NUM_PROMPTS))


async def test_restored_groups_that_became_too_old_are_generated_again_and_counted(tmp_path: Path) -> None:
    await run_and_kill(tmp_path, after_trained=4)
    with simulation(tmp_path, staleness=1) as peek:
        start = peek.store.latest()
    assert start is not None
    with simulation(tmp_path, staleness=1, num_rollouts=NUM_ROLLOUTS, start=start) as run:
        await run.trainers.load(start.folder)
        before = len(run.trainers.history)
        await run.loop.run()
    assert run.trained_groups == list(range(NUM_ROLLOUTS * NUM_PROMPTS))
    new = [each.version - v for each in run.trainers.history[before:] for sample in each.versions for v in sample]
    assert max(new) <= 1
    assert sum(metrics.get("staleness/dropped_groups", 0) for metrics in run.sink.logged.values()) > 0


async def test_without_staleness_a_checkpoint_contains_no_groups(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=0, num_rollouts=3, save_interval=1) as run:
        await run.loop.run()
        newest = run.store.latest()
    assert newest is not None
    assert sorted(path.name for path in newest.folder.iterdir()) == ["checkpoint.json", "history.json"]
    assert newest.state["source"] == {"prompts": {"position": 3 * NUM_PROMPTS}, "next_index": 3 * NUM_PROMPTS}
    assert Progress(**newest.state["progress"]).next_rollout == 3
    assert Prompts().position == 0


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_requested_stop_saves_after_the_step_and_the_resumed_run_continues_there(
    tmp_path: Path, staleness: int
) -> None:
    with simulation(tmp_path, staleness=staleness, num_rollouts=NUM_ROLLOUTS, length=long_tailed) as run:
        task = asyncio.create_task(run.loop.run())
        while len(run.trainers.history) < 3:
            await asyncio.sleep(0.0005)
        run.stop.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        num_trained, start = len(run.trainers.history), run.store.latest()
    assert start is not None
    assert 3 <= start.rollout_id == num_trained < NUM_ROLLOUTS
    assert max(run.sink.logged) == num_trained - 1
    assert not start.state["progress"]["stopped"], "the resumed run would end at once"
    with simulation(tmp_path, staleness=staleness, num_rollouts=NUM_ROLLOUTS, start=start, length=long_tailed) as again:
        await again.trainers.load(start.folder)
        progress = await again.loop.run()
    assert progress.next_rollout == NUM_ROLLOUTS
    assert again.trained_groups == list(range(NUM_ROLLOUTS * NUM_PROMPTS))
