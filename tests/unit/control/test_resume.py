"""Runs killed with rollouts ahead: no group is lost or used twice, and the staleness bound holds."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.checkpoint.pending_groups import load_dropped, load_groups
from rlscale.config import SamplingConfig
from rlscale.control.loop_config import Progress
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.plugins.user_hook import UserHook
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.group_filters import GroupFilters
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Group
from tests.unit.control.simulation import NUM_PROMPTS, NUM_SAMPLES, Prompts, simulation
from tests.unit.control.test_sampling import outcomes

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


async def test_the_hook_of_all_samples_gets_groups_that_were_dropped_before_the_checkpoint(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def record(groups: Sequence[Group]) -> None:
        seen.append([group.index for group in groups])

    values: dict[str, Any] = {
        "staleness": 2,
        "num_rollouts": NUM_ROLLOUTS,
        "filters": GroupFilters(dynamic=lambda group: group.index % 2 == 0 or "odd"),
        "sampling": SamplingConfig(all_samples_process_path="a:b", over_sampling_batch_size=2 * NUM_PROMPTS),
        "hooks": RolloutHooks(
            all_samples=UserHook(key="sampling.all_samples_process_path", function=record, timeout_s=30.0)
        ),
    }
    with simulation(tmp_path, save_interval=1, **values) as run:
        # Rollouts ahead finish while the first one trains, so that checkpoints have groups that they dropped.
        run.trainers.num_iterations = 200
        task = asyncio.create_task(run.loop.run())
        while (newest := run.store.latest()) is None or newest.rollout_id < 3:
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start, pages = run.store.latest(), list(run.pages)
    assert start is not None
    before = load_dropped(start.folder)
    assert before and all(group.index % 2 for groups in before.values() for group in groups)
    del seen[start.rollout_id :]
    with simulation(tmp_path, start=start, **values) as again:
        await again.trainers.load(start.folder)
        await again.loop.run()
    kept = [page for page in pages if page["step"] < start.rollout_id]
    all_outcomes = outcomes(kept + again.pages)
    dropped = {index // NUM_SAMPLES for index, outcome in all_outcomes.items() if outcome == "dropped/odd"}
    found = [index for each in seen for index in each]
    assert len(seen) == NUM_ROLLOUTS and len(found) == len(set(found))
    assert {group.index for groups in before.values() for group in groups} <= set(found)
    # Groups of rollouts that would follow the last one have an outcome, and no rollout that the hook gets.
    assert {index for index in found if index % 2} <= dropped
    assert [index for index in sorted(found) if index % 2 == 0] == sorted(again.trained_groups)


async def fail_the_second(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
    if trajectory.id % NUM_SAMPLES:
        return Failure(cause=FailureCause.tool, message="broke")
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    return None


async def test_failed_trajectories_of_groups_in_a_checkpoint_keep_their_cause(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "staleness": 2,
        "num_rollouts": NUM_ROLLOUTS,
        "generate": fail_the_second,
        "sampling": SamplingConfig(min_group_size=1, max_retries=0, max_failed_share=0.9),
    }
    with simulation(tmp_path, save_interval=1, **values) as run:
        run.trainers.num_iterations = 200
        task = asyncio.create_task(run.loop.run())
        while (newest := run.store.latest()) is None or newest.rollout_id < 3:
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start, pages = run.store.latest(), list(run.pages)
    assert start is not None
    assert any(group.failed for group in load_groups(start.folder)), "the checkpoint has finished groups"
    with simulation(tmp_path, start=start, **values) as again:
        await again.trainers.load(start.folder)
        await again.loop.run()
    found = outcomes([page for page in pages if page["step"] < start.rollout_id] + again.pages)
    assert {index for index, outcome in found.items() if outcome == "failed/tool"} == {
        index * NUM_SAMPLES + 1 for index in again.trained_groups
    }
