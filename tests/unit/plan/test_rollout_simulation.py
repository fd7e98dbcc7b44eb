"""Simulated times of rollouts: small cases by hand, bounds, and long-tailed lengths."""

import random
from dataclasses import replace

import pytest

from rlscale.plan.rollout_simulation import EngineCosts, SimulatedLoop, simulate
from rlscale.plan.schedule_comparison import compare_schedules


def loop(**values: int | float | bool | str | EngineCosts) -> SimulatedLoop:
    return SimulatedLoop(**{"num_groups": 4, "num_samples": 1, "num_slots": 4, "num_rollouts": 10, **values})  # type: ignore[arg-type]


def long_tailed(number: int = 3000) -> list[list[int]]:
    rng = random.Random(1)
    return [[max(1, min(32768, int(rng.lognormvariate(6.5, 1.5))))] for _ in range(number)]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, 10.0),  # all requests at once
        ({"num_slots": 2}, 20.0),  # in two waves
        ({"num_samples": 3, "num_slots": 4}, 30.0),
        ({"train_steps": 5.0}, 15.0),  # generation and training alternate
        ({"schedule": "longest_first"}, 10.0),
        ({"schedule": "tail_batching"}, 10.0),
    ],
)
def test_equal_lengths_take_the_time_of_their_waves(values: dict[str, float], steps: float) -> None:
    found = simulate(loop(**values), [[10]])
    assert found.steps_per_rollout == pytest.approx(steps)


@pytest.mark.parametrize(
    ("costs", "values", "steps"),
    [
        (EngineCosts(request=3.0), {}, 22.0),  # four requests of 3 and 10 steps together
        (EngineCosts(request=3.0), {"num_slots": 2}, 32.0),
        (EngineCosts(prefill=2.0), {}, 12.0),  # the prompts of the four together
        (EngineCosts(prefill=2.0), {"num_slots": 1}, 48.0),
        # Of 8 slots a half decodes: 0.2 + 0.8 / 2 of a step.
        (EngineCosts(step_of_one=0.2), {"num_slots": 8}, 6.0),
        (EngineCosts(step_of_one=0.2), {}, 10.0),
    ],
)
def test_costs_of_the_engine_take_time(costs: EngineCosts, values: dict[str, int], steps: float) -> None:
    assert simulate(loop(costs=costs, **values), [[10]]).steps_per_rollout == pytest.approx(steps)


def test_the_tokens_of_a_continued_response_are_prefilled() -> None:
    """Groups of 10 and 30 tokens by turns, one of each trained: one slot is never short of work."""
    made = loop(num_groups=1, num_slots=2, wave=2, is_partial=True, num_rollouts=100)
    prompts = [[10], [30]]
    costs = [EngineCosts(), EngineCosts(prefill_token=0.5), EngineCosts(prefill_token=0.5, abort=1.0)]
    free, paid, aborted = (simulate(replace(made, costs=each), prompts).steps_per_rollout for each in costs)
    assert free < paid < aborted < free + 16


def test_surplus_groups_are_generated_again_once_they_are_too_old() -> None:
    """A rollout of one group of two: if the other one is shorter, it is in the buffer after the first."""
    made = loop(num_groups=1, num_slots=2, num_rollouts=200)
    plain, exact, stale = (
        simulate(replace(made, **values), [[5], [10]]).steps_per_rollout
        for values in ({}, {"wave": 2}, {"wave": 2, "max_staleness": 1})
    )
    assert plain == pytest.approx(7.5, rel=0.05)
    assert exact == pytest.approx(plain, rel=0.1) and stale < 0.9 * exact


def test_a_response_of_too_many_versions_starts_again() -> None:
    made = loop(num_groups=1, num_slots=2, wave=2, is_partial=True, num_rollouts=400)
    prompts = [[10]] * 9 + [[45]]
    times = {limit: simulate(replace(made, max_versions=limit), prompts).steps_per_rollout for limit in (None, 9, 5, 2)}
    assert times[9] == times[None] < times[5] <= times[2]


def test_staleness_overlaps_training() -> None:
    times = [simulate(loop(max_staleness=k, train_steps=10.0), [[10]]).steps_per_rollout for k in (0, 1)]
    assert times[0] == 20.0 and times[1] == pytest.approx(11.0)


def test_slots_are_never_more_than_busy() -> None:
    for name, found in compare_schedules(loop(num_groups=16, num_slots=8), long_tailed()).items():
        assert 0 < found.busy_share <= 1 + 1e-9, name


def test_longest_first_helps_where_long_requests_wait() -> None:
    prompts = [[100]] + [[10]] * 9
    plain, longest = (
        simulate(loop(num_groups=20, num_slots=4, schedule=name, num_rollouts=200), prompts).steps_per_rollout
        for name in ("plain", "longest_first")
    )
    assert longest < 0.95 * plain


def test_partial_rollouts_are_four_times_the_plain_loop_with_long_tails() -> None:
    made = loop(num_groups=128, num_slots=64, num_rollouts=40)
    assert made.requests_per_slot == 2
    found = compare_schedules(made, long_tailed())
    ratios = {name: found["plain"].steps_per_rollout / time.steps_per_rollout for name, time in found.items()}
    assert ratios["partial_rollout"] >= 4
    assert ratios["tail_batching"] > 1.5 and ratios["plain"] == 1
    assert found["partial_rollout"].busy_share > 0.95


def test_the_same_seed_gives_the_same_times() -> None:
    made = loop(num_groups=16, num_slots=8)
    assert compare_schedules(made, long_tailed()) == compare_schedules(made, long_tailed())
