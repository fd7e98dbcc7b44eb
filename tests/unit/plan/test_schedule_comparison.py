"""Partial rollouts compared with the plain loop for long-tailed lengths, and their fastest settings."""

import random

import pytest

from rlscale.plan.rollout_simulation import SimulatedLoop
from rlscale.plan.schedule_comparison import compare_schedules, find_partial_settings

LONGEST = 32768


def draw(num_prompts: int, group_size: int) -> list[list[int]]:
    rng = random.Random(1)
    return [
        [max(1, min(LONGEST, int(rng.lognormvariate(6.5, 1.5)))) for _ in range(group_size)] for _ in range(num_prompts)
    ]


def loop(group_size: int, *, max_versions: int | None) -> SimulatedLoop:
    return SimulatedLoop(
        num_groups=128 // group_size, num_samples=group_size, num_slots=64, num_rollouts=20, max_versions=max_versions
    )


@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.slow
def test_partial_rollouts_are_four_times_the_plain_loop_with_two_requests_per_slot(group_size: int) -> None:
    made, prompts = loop(group_size, max_versions=5), draw(1000, group_size)
    assert made.requests_per_slot == 2
    plain = compare_schedules(made, prompts)["plain"].steps_per_rollout
    best = find_partial_settings(made, prompts)
    assert plain / best.time.steps_per_rollout >= 4


def test_groups_whose_requests_end_apart_need_more_of_them_in_flight() -> None:
    alone, grouped = (find_partial_settings(loop(size, max_versions=None), draw(1000, size)) for size in (1, 8))
    assert alone.over_sampling_batch_size == 2 * 128
    assert grouped.over_sampling_batch_size > 2 * 16 and grouped.time.busy_share > 0.95


@pytest.mark.slow
def test_no_more_versions_than_the_longest_response_needs() -> None:
    short = find_partial_settings(loop(1, max_versions=5), [[10], [12]])
    assert (short.over_sampling_batch_size, short.max_weight_versions) == (256, 5)
    assert find_partial_settings(loop(1, max_versions=5), draw(1000, 1)).max_weight_versions == 10
