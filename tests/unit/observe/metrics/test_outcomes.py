"""The line about the outcomes of a run's trajectories."""

from rlscale.observe.metrics.outcomes import describe_outcomes


def test_a_rollout_without_outcomes_was_trained_whole() -> None:
    records = [
        {"step": 0, "eval/reward_mean": 0.5},
        {"step": 0, "train/loss": 0.1},
        {
            "step": 1,
            "train/loss": 0.1,
            "trajectories/trained": 60.0,
            "trajectories/failed/grader": 4.0,
            "trajectories/dropped/equal_rewards": 32.0,
            "trajectories/open": 8.0,
            "trajectories/failed_share": 4 / 96,
        },
    ]
    expected = "124 trained, 32 (20.0%) dropped by equal_rewards, 4 (2.5%) failed by grader"
    assert describe_outcomes(records, per_rollout=64) == expected
    assert describe_outcomes(records[:2], per_rollout=64) is None
    assert describe_outcomes([], per_rollout=64) is None
    critic_only = [{"step": 0, "train/critic_loss": 0.1}, *records[2:]]
    assert describe_outcomes(critic_only, per_rollout=64) == expected
