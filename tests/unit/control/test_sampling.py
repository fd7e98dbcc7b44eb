"""Filters, failures and partial rollouts in the loop: what is trained, and the outcome of everything else."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import SamplingConfig
from rlscale.errors import CheckError, FailureShareError
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.group_filters import GroupFilters
from rlscale.rollout.ledger import parse_ranges
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Group
from tests.unit.control.simulation import NUM_PROMPTS, NUM_SAMPLES, simulation


def outcomes(pages: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The outcome of every trajectory; fails where one has two."""
    found: dict[int, str] = {}
    for page in pages:
        for outcome, ranges in page.items():
            if outcome in ("step", "open"):
                continue
            for index in parse_ranges(ranges):
                assert index not in found, f"trajectory {index} is {found[index]} and {outcome}"
                found[index] = outcome
    return found


def even(group: Group) -> bool | str:
    return group.index % 2 == 0 or "odd"


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_dropped_groups_are_replaced(tmp_path: Path, staleness: int) -> None:
    with simulation(tmp_path, staleness=staleness, num_rollouts=4, filters=GroupFilters(dynamic=even)) as run:
        await run.loop.run()
    if staleness == 0:
        assert run.trained_groups == [2 * i for i in range(4 * NUM_PROMPTS)]
    assert len(run.trained_groups) == 4 * NUM_PROMPTS and not any(index % 2 for index in run.trained_groups)
    found = outcomes(run.pages)
    assert {index for index, outcome in found.items() if outcome == "trained"} == {
        index * NUM_SAMPLES + j for index in run.trained_groups for j in range(NUM_SAMPLES)
    }
    assert set(found.values()) == {"trained", "dropped/odd"}


async def test_over_sampled_groups_wait_in_the_buffer_and_are_used_if_they_are_young_enough(tmp_path: Path) -> None:
    sampling = SamplingConfig(over_sampling_batch_size=2 * NUM_PROMPTS)
    with simulation(tmp_path, staleness=1, num_rollouts=4, sampling=sampling) as run:
        await run.loop.run()
    assert run.trained_groups == list(range(4 * NUM_PROMPTS))
    assert any(page["open"] for page in run.pages)
    assert max(run.ages) <= 1


def loses_a_trajectory(group: Group) -> bool:
    if group.index == 4:
        group.samples.pop()
    return True


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_lost_trajectory_ends_the_run_at_the_end_of_its_step(tmp_path: Path, staleness: int) -> None:
    filters = GroupFilters(dynamic=loses_a_trajectory)
    with (
        simulation(tmp_path, staleness=staleness, num_rollouts=4, filters=filters) as run,
        pytest.raises(BaseExceptionGroup) as caught,
    ):
        await run.loop.run()
    assert caught.group_contains(CheckError, match=rf"got 1 that are in no rollout .*: \[{4 * NUM_SAMPLES + 1}\]")
    assert len(run.pages) == 1, "the second rollout has the group"


async def fail_twice_in_three(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
    if trajectory.id % 3 == 0:
        return Failure(cause=FailureCause.tool, message=f"tool of {trajectory.id} broke")
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    return None


async def test_failed_trajectories_leave_their_group_and_small_groups_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlscale.rollout.group_generator.BACKOFF_S", 0.0)
    sampling = SamplingConfig(min_group_size=1, max_failed_share=0.9)
    with simulation(tmp_path, num_rollouts=3, sampling=sampling, generate=fail_twice_in_three) as run:
        await run.loop.run()
    found = outcomes(run.pages)
    assert {index for index, outcome in found.items() if outcome == "failed/tool"} == set(
        range(0, 3 * 3 * NUM_SAMPLES, 3)
    )
    assert run.trained_groups == list(range(3 * NUM_PROMPTS))
    assert run.sink.logged[0]["trajectories/failed_share"] == pytest.approx(1 / 3)
    with simulation(
        tmp_path / "pairs",
        num_rollouts=3,
        sampling=SamplingConfig(min_group_size=2, max_failed_share=0.9),
        generate=fail_twice_in_three,
    ) as run:
        await run.loop.run()
    # A group of two trajectories is whole if neither number is divisible by 3.
    whole = [index for index in range(100) if (2 * index) % 3 and (2 * index + 1) % 3]
    assert run.trained_groups == whole[: 3 * NUM_PROMPTS]
    assert set(outcomes(run.pages).values()) == {"trained", "failed/tool", "dropped/min_group_size"}


async def test_a_run_whose_tools_are_broken_stops_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlscale.rollout.group_generator.BACKOFF_S", 0.0)

    async def broken(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        return Failure(cause=FailureCause.sandbox, message="no sandbox answers")

    with (
        simulation(tmp_path, num_rollouts=3, generate=broken) as run,
        pytest.raises(BaseExceptionGroup) as caught,
    ):
        await run.loop.run()
    found = caught.value.subgroup(FailureShareError)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert "by cause sandbox; the last one: no sandbox answers" in str(found)


def long_tailed(index: int) -> int:
    return 60 if index % 4 == 0 else 3


async def test_partial_rollouts_continue_long_answers_with_the_next_weights(tmp_path: Path) -> None:
    sampling = SamplingConfig(partial_rollout=True, over_sampling_batch_size=2 * NUM_PROMPTS, max_weight_versions=9)
    with simulation(tmp_path, num_rollouts=8, length=long_tailed, sampling=sampling) as run:
        await run.loop.run()
    lengths = [len(sample) for each in run.trainers.history for sample in each.versions]
    assert set(lengths) <= {3, 60}, "an answer is as long as in one piece"
    several = [s for each in run.trainers.history for s in each.versions if len(set(s)) > 1]
    assert several and all(s == sorted(s) and len(s) == 60 for s in several)
    assert len(run.trained_groups) == len(set(run.trained_groups)) == 8 * NUM_PROMPTS
    assert run.trained_groups != sorted(run.trained_groups), "short answers overtake"
    assert set(outcomes(run.pages).values()) == {"trained"}


async def test_earlier_weights_are_masked_where_the_key_says_so(tmp_path: Path) -> None:
    sampling = SamplingConfig(
        partial_rollout=True, mask_offpolicy_in_partial_rollout=True, over_sampling_batch_size=2 * NUM_PROMPTS
    )
    with simulation(tmp_path, num_rollouts=8, length=long_tailed, sampling=sampling) as run:
        await run.loop.run()
    assert max(run.ages_of_trainable) == 0
    assert any(len(set(s)) > 1 for each in run.trainers.history for s in each.versions)


async def test_a_trajectory_of_too_many_versions_starts_again(tmp_path: Path) -> None:
    sampling = SamplingConfig(partial_rollout=True, over_sampling_batch_size=3 * NUM_PROMPTS, max_weight_versions=2)
    with simulation(tmp_path, num_rollouts=10, length=long_tailed, sampling=sampling) as run:
        await run.loop.run()
    assert max(len(set(s)) for each in run.trainers.history for s in each.versions) <= 2


async def test_rounds_do_not_depend_on_the_speed_of_engines(tmp_path: Path) -> None:
    sampling = SamplingConfig(
        partial_rollout=True, round_tokens=7, over_sampling_batch_size=2 * NUM_PROMPTS, max_weight_versions=9
    )
    filters = GroupFilters(dynamic=lambda group: group.index % 5 != 1 or "fifth")
    found = []
    for seed in range(3):
        values: dict[str, Any] = {"length": long_tailed, "sampling": sampling, "filters": filters}
        with simulation(tmp_path / str(seed), num_rollouts=8, **values) as run:
            speeds = random.Random(seed)
            run.engine.pace = lambda speeds=speeds: speeds.randint(1, 5)  # type: ignore[misc]
            await run.loop.run()
        assert set(outcomes(run.pages).values()) == {"trained", "dropped/fifth"}
        found.append((run.pages, [(each.groups, each.versions, each.masks) for each in run.trainers.history]))
    assert found[0] == found[1] == found[2]
    samples = [sample for _, versions, _ in found[0][1] for sample in versions]
    assert {len(sample) for sample in samples} == {3, 60} and any(len(set(sample)) > 1 for sample in samples)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_killed_run_gives_every_trajectory_one_outcome(tmp_path: Path, staleness: int, partial: bool) -> None:
    values: dict[str, Any] = {
        "staleness": staleness,
        "num_rollouts": 8,
        "save_interval": 1,
        "length": long_tailed,
        "filters": GroupFilters(dynamic=lambda group: group.index % 5 != 1 or "fifth"),
        "sampling": SamplingConfig(
            partial_rollout=partial, over_sampling_batch_size=2 * NUM_PROMPTS, max_weight_versions=9
        ),
    }
    with simulation(tmp_path, **values) as run:
        run.trainers.num_iterations = 40
        task = asyncio.create_task(run.loop.run())
        while len(run.trainers.history) < 4:
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start, pages = run.store.latest(), list(run.pages)
    assert start is not None
    with simulation(tmp_path, start=start, **values) as again:
        await again.trainers.load(start.folder)
        await again.loop.run()
    # A resumed run writes the pages of the rollouts after the checkpoint again.
    kept = [page for page in pages if page["step"] < start.rollout_id]
    assert [page["step"] for page in kept + again.pages] == list(range(8))
    found = outcomes(kept + again.pages)
    trained = {index for index, outcome in found.items() if outcome == "trained"}
    assert trained == {i * NUM_SAMPLES + j for i in again.trained_groups for j in range(NUM_SAMPLES)}
    assert set(found.values()) == {"trained", "dropped/fifth"}
    still_open = set(parse_ranges(again.pages[-1]["open"]))
    assert found.keys() | still_open == set(range(max([*found, *still_open]) + 1)), "no trajectory is lost"
