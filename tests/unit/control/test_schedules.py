"""Schedules of prompts in the loop: what each rollout trains on, with staleness, the buffer and a resumed run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import SamplingConfig, ScheduleName
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.group_filters import GroupFilters
from rlscale.rollout.ledger import parse_ranges
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Group, Prompt
from tests.unit.control.simulation import NUM_PROMPTS, NUM_SAMPLES, Prompts, Simulation, simulation

EPOCH = 3 * NUM_PROMPTS
FIRST_TAIL = EPOCH - 2  # rows from here on have long responses


class Epochs(Prompts):
    """The same nine prompts again and again."""

    def take(self, num_prompts: int) -> list[Prompt]:
        first, self.position = self.position, self.position + num_prompts
        rows = [i % EPOCH for i in range(first, self.position)]
        return [Prompt(index=row, text=str(row), token_ids=(1, row)) for row in rows]


def length_of(row: int) -> int:
    """Different for each row."""
    return 2 + row if row < FIRST_TAIL else 30 + row


def rows_trained(run: Simulation) -> list[list[int]]:
    """Rows of the prompts of each rollout, in the order of their groups."""
    row_of = {length_of(row): row for row in range(EPOCH)}
    return [[row_of[len(versions)] for versions in each.versions[::NUM_SAMPLES]] for each in run.trainers.history]


def settings(name: ScheduleName, **values: Any) -> dict[str, Any]:
    sampling = SamplingConfig(schedule=name, difficulty_weights=[0.5, 1.0], **values)
    return {"sampling": sampling, "length": length_of, "save_interval": 1}


async def test_the_longest_expected_responses_are_submitted_first(tmp_path: Path) -> None:
    with simulation(
        tmp_path,
        num_rollouts=6,
        prompts=Epochs(),
        length=length_of,
        sampling=SamplingConfig(schedule=ScheduleName.longest_first),
    ) as run:
        await run.loop.run()
    # Without a length in the first epoch, by decreasing length in the second one.
    assert rows_trained(run) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [2, 1, 0], [5, 4, 3], [8, 7, 6]]


async def test_long_prompts_share_a_rollout(tmp_path: Path) -> None:
    with simulation(
        tmp_path,
        num_rollouts=20,
        prompts=Epochs(),
        length=length_of,
        sampling=SamplingConfig(schedule=ScheduleName.tail_batching),
    ) as run:
        await run.loop.run()
    known = rows_trained(run)[3:]
    shares = [sum(row >= FIRST_TAIL for row in rows) for rows in known]
    assert set(shares) <= {0, NUM_PROMPTS} and NUM_PROMPTS in shares


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_resumed_run_draws_the_same_prompts(tmp_path: Path, name: ScheduleName, staleness: int) -> None:
    values = settings(name) | {"staleness": staleness}
    with simulation(tmp_path / "whole", num_rollouts=10, prompts=Epochs(), **values) as run:
        await run.loop.run()
        expected = rows_trained(run)
    with simulation(tmp_path / "cut", num_rollouts=5, prompts=Epochs(), **values) as run:
        await run.loop.run()
        start = run.store.latest()
    assert start is not None
    with simulation(tmp_path / "cut", num_rollouts=10, prompts=Epochs(), start=start, **values) as run:
        await run.trainers.load(start.folder)
        await run.loop.run()
    # With staleness the whole run has drawn the sixth rollout before the fifth one was trained on.
    number = 10 if staleness == 0 else 5
    assert rows_trained(run)[:number] == expected[:number]
    assert len(run.trained_groups) == len(set(run.trained_groups)) == 10 * NUM_PROMPTS


@pytest.mark.parametrize("name", list(ScheduleName))
async def test_schedules_work_with_partial_rollouts_and_a_buffer(tmp_path: Path, name: ScheduleName) -> None:
    values = settings(name, partial_rollout=True, over_sampling_batch_size=2 * NUM_PROMPTS)
    with simulation(tmp_path, num_rollouts=8, staleness=1, prompts=Epochs(), **values) as run:
        await run.loop.run()
    assert len(run.trained_groups) == len(set(run.trained_groups)) == 8 * NUM_PROMPTS


def drop_every_third(group: Group) -> bool | str:
    return group.prompt.index % 3 != 0 or "third"


def row_stats(run: Simulation) -> dict[str, Any]:
    checkpoint = run.store.latest()
    assert checkpoint is not None
    return dict(checkpoint.state["source"]["schedule"]["stats"])


async def test_dropped_groups_count_for_the_difficulty_of_their_prompt(tmp_path: Path) -> None:
    filters = GroupFilters(dynamic=drop_every_third)
    with simulation(tmp_path, num_rollouts=4, prompts=Epochs(), filters=filters, **settings(ScheduleName.plain)) as run:
        await run.loop.run()
        found = row_stats(run)
    assert not {row for rows in rows_trained(run) for row in rows} & {0, 3, 6}
    assert all(found[str(row)]["num_groups"] >= 1 and found[str(row)]["accuracy"] == 1.0 for row in (0, 3, 6))


async def second_fails(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
    if trajectory.group_index == 1:
        trajectory.reward = 0.0
        if trajectory.id % NUM_SAMPLES:
            return Failure(cause=FailureCause.tool, message="tool broke")
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    return None


async def test_groups_with_failures_do_not_count_for_the_difficulty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlscale.rollout.group_generator.BACKOFF_S", 0.0)
    values = settings(ScheduleName.plain, min_group_size=NUM_SAMPLES, max_failed_share=0.9)
    with simulation(tmp_path, num_rollouts=1, prompts=Epochs(), generate=second_fails, **values) as run:
        await run.loop.run()
        assert sorted(row_stats(run)) == ["0", "2", "3"]
    assert any("dropped/min_group_size" in page for page in run.pages)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_resumed_run_counts_dropped_groups_once(tmp_path: Path, staleness: int) -> None:
    values = settings(ScheduleName.longest_first) | {"staleness": staleness}
    values["filters"] = GroupFilters(dynamic=drop_every_third)
    with simulation(tmp_path / "whole", num_rollouts=9, prompts=Epochs(), **values) as run:
        await run.loop.run()
        expected, stats = rows_trained(run), row_stats(run)
    # A training pass in which the next rollout finishes: the checkpoint is taken with its dropped groups.
    values |= {"num_rollouts": 9, "train_iterations": 300}
    with simulation(tmp_path / "cut", prompts=Epochs(), **values) as run:
        run.stop.set()
        with pytest.raises(asyncio.CancelledError):
            await run.loop.run()
        pages, start = list(run.pages), run.store.latest()
    assert start is not None and len(pages) == 1
    assert list(start.state["source"]["schedule"]["dropped"]) == (["1"] if staleness else [])
    with simulation(tmp_path / "cut", prompts=Epochs(), start=start, **values) as run:
        await run.trainers.load(start.folder)
        await run.loop.run()
        found, pages = row_stats(run), [*pages, *run.pages]
    names = ("trained", "dropped/third")
    num_finished = len([i for page in pages for name in names for i in parse_ranges(page.get(name, []))])
    assert sum(each["num_groups"] for each in found.values()) * NUM_SAMPLES == num_finished
    if not staleness:
        assert (rows_trained(run), found) == (expected, stats)
