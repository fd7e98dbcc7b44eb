"""A complete run in true-on-policy mode: two trainer ranks and the embedded engine agree bitwise."""

from tests.integration.conftest import Command


def test_trainer_and_engine_agree_bitwise_while_the_model_learns(command: Command) -> None:
    done = command.run(
        "train.true_on_policy_mode=true",
        "cluster.actor_num_gpus_per_node=2",
        "rollout.temperature=0.9",
        "reward.type=random",
        "optim.lr=1e-2",
        "eval.interval=null",
        "data.num_rollout=4",
    )
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert [m["logprob_diff/max"] for m in trained] == [0.0] * 4
    assert all(m["train/grad_norm"] > 0 for m in trained)
    assert command.left_over() == {}
