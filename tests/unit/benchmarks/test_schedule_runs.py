"""Prompts of the measured rollouts: the draws of the simulation, and prompts that name their draw."""

import random

from rlscale.plan.rollout_simulation import SimulatedLoop, simulate


def test_prompts_have_the_lengths_that_the_simulation_draws() -> None:
    from schedule_runs import DrawnPrompts, draw_of

    rng = random.Random(3)
    lengths = [[rng.randint(1, 50) for _ in range(4)] for _ in range(30)]
    drawn = DrawnPrompts(lengths, num_samples=2, seed=0)
    prompts = drawn.take(5) + drawn.take(195)
    assert [draw_of(prompt.token_ids) for prompt in prompts] == list(range(200))
    # A group after the other, with a slot for each response: a rollout takes the steps of the longest one.
    loop = SimulatedLoop(num_groups=1, num_samples=2, num_slots=2, num_rollouts=200, seed=0)
    assert simulate(loop, lengths).steps_per_rollout == sum(max(each) for each in drawn.lengths) / 200
    assert all(set(each) <= set(lengths[prompt.index]) for prompt, each in zip(prompts, drawn.lengths, strict=True))
