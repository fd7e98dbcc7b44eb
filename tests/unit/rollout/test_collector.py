"""Collection of a rollout: which groups it has, whatever the order in which they finish."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from rlscale.errors import EmptyRolloutError
from rlscale.protocols import CollectSettings
from rlscale.rollout.collector import Collector
from rlscale.rollout.group_filters import TOO_FEW
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus


class Desk:
    """Prompts without end, whose groups take a number of iterations of the event loop."""

    def __init__(self, *, iterations: Callable[[int], int], reason: Callable[[int], str | None]) -> None:
        self.iterations, self.reason = iterations, reason
        self.next_index = 0
        self.draws: list[int | None] = []
        self.dropped: dict[int, str] = {}
        self.stopped: set[int] = set()

    async def draw(self, number: int | None) -> Sequence[Group]:
        self.draws.append(number)
        first, self.next_index = self.next_index, self.next_index + (number or 3)
        return [make_group(index, SampleStatus.pending) for index in range(first, self.next_index)]

    async def make(self, group: Group, collector: Collector) -> Group:
        for _ in range(self.iterations(group.index)):
            await asyncio.sleep(0)
            if group.index in self.stopped:
                return make_group(group.index, SampleStatus.aborted)
        return make_group(group.index, SampleStatus.completed)

    async def stop(self, indices: Sequence[int]) -> None:
        self.stopped |= set(indices)

    def drop(self, group: Group, reason: str) -> None:
        assert group.index not in self.dropped, "a group is dropped once"
        self.dropped[group.index] = reason

    def collector(self, settings: CollectSettings) -> Collector:
        return Collector(
            settings,
            draw=self.draw,
            make=self.make,
            judge=lambda group: self.reason(group.index),
            drop=self.drop,
            stop=self.stop,
        )


def make_group(index: int, status: SampleStatus) -> Group:
    prompt = Prompt(index=index, text="", token_ids=(1,))
    sample = Sample(index=index, group_index=index, prompt=prompt, seed=0, status=status)
    return Group(index=index, prompt=prompt, samples=[sample])


def kept_indices(groups: Sequence[Group]) -> list[int]:
    return [group.index for group in groups]


@pytest.mark.parametrize("iterations", [lambda i: 1 + i % 7, lambda i: 20 - i % 20, lambda i: 3])
async def test_the_first_kept_groups_in_the_order_of_prompts_make_a_rollout(iterations: Callable[[int], int]) -> None:
    desk = Desk(iterations=iterations, reason=lambda i: "odd" if i % 2 else None)
    collector = desk.collector(CollectSettings(num_groups=4, wave=4))
    assert kept_indices(await collector.run()) == [0, 2, 4, 6]
    # The first wave keeps 2 of 4, the second 2 of 4.
    assert desk.draws == [4, 4]
    assert desk.dropped == {1: "odd", 3: "odd", 5: "odd", 7: "odd"}
    assert collector.pop_surplus() == []


async def test_groups_beyond_the_rollout_are_surplus_finished_or_fresh() -> None:
    desk = Desk(iterations=lambda i: 50 if i == 5 else 2, reason=lambda i: None)
    collector = desk.collector(CollectSettings(num_groups=3, wave=6))
    assert kept_indices(await collector.run()) == [0, 1, 2]
    surplus = {group.index: group for group in collector.pop_surplus()}
    assert sorted(surplus) == [3, 4, 5]
    assert surplus[3].is_finished and surplus[4].is_finished
    assert surplus[5].samples == [], "a group that was cancelled starts again"


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("iterations", [lambda i: 1 + i, lambda i: 20 - i, lambda i: 5 if i == 1 else 1])
async def test_what_finishes_beyond_a_rollout_does_not_depend_on_speed(
    iterations: Callable[[int], int], is_filled: bool
) -> None:
    desk = Desk(iterations=iterations, reason=lambda i: "odd" if i in (0, 3, 5) else None)
    collector = desk.collector(CollectSettings(num_groups=2, wave=7, repeats=True, is_filled=is_filled))
    assert kept_indices(await collector.run()) == [1, 2]
    surplus = {group.index: group for group in collector.pop_surplus()}
    assert desk.dropped == {0: "odd"} and sorted(surplus) == [3, 4, 5, 6]
    assert surplus[3].samples == surplus[5].samples == [], "they are generated again, with other weights"


async def test_a_slow_first_group_is_waited_for() -> None:
    desk = Desk(iterations=lambda i: 50 if i == 0 else 1, reason=lambda i: None)
    assert kept_indices(await desk.collector(CollectSettings(num_groups=2, wave=6)).run()) == [0, 1]


async def test_partial_rollouts_have_the_first_groups_that_finish_and_return_the_others_unfinished() -> None:
    desk = Desk(iterations=lambda i: 50 if i in (0, 2) else 1 + i, reason=lambda i: None)
    collector = desk.collector(CollectSettings(num_groups=2, wave=4, takes_first_finished=True))
    assert kept_indices(await collector.run()) == [1, 3]
    surplus = collector.pop_surplus()
    assert kept_indices(surplus) == [0, 2]
    assert all(group.samples[0].status == SampleStatus.aborted for group in surplus)


async def test_dropped_groups_fill_a_rollout_where_the_filter_says_so() -> None:
    desk = Desk(iterations=lambda i: 5 - i, reason=lambda i: "equal_rewards" if i != 2 else None)
    collector = desk.collector(CollectSettings(num_groups=3, wave=4, is_filled=True))
    assert kept_indices(await collector.run()) == [0, 1, 2]
    assert desk.draws == [4], "no further prompts are drawn"
    assert desk.dropped == {3: "equal_rewards"}


async def test_groups_of_too_few_trajectories_fill_no_rollout() -> None:
    desk = Desk(iterations=lambda i: 1, reason=lambda i: {0: TOO_FEW, 1: "equal_rewards"}.get(i))
    collector = desk.collector(CollectSettings(num_groups=3, wave=3, is_filled=True))
    # Group 1 would fill the rollout, but with group 0 there is one prompt too few.
    assert kept_indices(await collector.run()) == [2, 3, 4]
    assert desk.draws == [3, 3] and desk.dropped == {0: TOO_FEW, 1: "equal_rewards"}


async def test_a_filter_that_drops_everything_ends_the_run() -> None:
    desk = Desk(iterations=lambda i: 1, reason=lambda i: "too_easy")
    with pytest.raises(EmptyRolloutError, match=r"must keep some of its groups, got 40 groups in a row.*'too_easy'"):
        await desk.collector(CollectSettings(num_groups=2, wave=2)).run()


async def test_groups_that_fail_one_after_the_other_end_the_run_with_the_last_failure() -> None:
    desk = Desk(iterations=lambda i: 1, reason=lambda i: TOO_FEW)

    async def make(group: Group, collector: Collector) -> Group:
        failed = Failure(cause=FailureCause.tool, message=f"tool of {group.index} broke")
        group.samples[0].status, group.samples[0].failure = SampleStatus.completed, failed
        return Group(index=group.index, prompt=group.prompt, samples=[], failed=group.samples)

    desk.make = make  # type: ignore[method-assign]
    with pytest.raises(
        EmptyRolloutError, match=r"for 'min_group_size'; 1 of its trajectories failed: tool of \d+ broke"
    ):
        await desk.collector(CollectSettings(num_groups=2, wave=2)).run()


async def test_a_fixed_rollout_is_one_draw() -> None:
    desk = Desk(iterations=lambda i: 3 - i, reason=lambda i: None)
    assert kept_indices(await desk.collector(CollectSettings()).run()) == [0, 1, 2]
    assert desk.draws == [None]


async def test_pending_groups_are_those_without_a_outcome_at_any_moment() -> None:
    desk = Desk(iterations=lambda i: 4 * (i + 1), reason=lambda i: "odd" if i % 2 else None)
    collector = desk.collector(CollectSettings(num_groups=3, wave=5))
    task = asyncio.ensure_future(collector.run())
    while not task.done():
        await asyncio.sleep(0)
        pending = {group.index for group in collector.pending()}
        assert pending | desk.dropped.keys() == set(range(desk.next_index))
        assert not pending & desk.dropped.keys()
