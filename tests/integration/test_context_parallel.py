"""A complete run with two context-parallel ranks, which split every sample."""

import pytest

from tests.integration.conftest import Command


@pytest.mark.nightly
def test_two_ranks_split_samples_and_agree_with_the_engine(command: Command) -> None:
    sizes = ("batch.use_dynamic_batch_size=true", "batch.max_tokens_per_gpu=40", "data.num_rollout=2")
    done = command.run(
        "cluster.actor_num_gpus_per_node=2",
        "fsdp.context_parallel_size=2",
        "fsdp.attn_implementation=sdpa",
        "debug.profile_rollouts=[1]",
        "ci.enabled=true",  # fails where engine and trainer differ in logprobs or version
        *sizes,
    )
    assert done.code == 0, done.err
    assert (
        "fsdp.attn_implementation is ignored: fsdp.context_parallel_size has its own attention" in done.out + done.err
    )
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert [record["weights/version"] for record in steps] == [1, 2]
    assert all(0 <= record["logprob_diff/mean"] < 1e-4 for record in steps)
    profiles = {path.name for path in (command.run_dir / "profile").glob("*.json.gz")}
    assert profiles == {"rollout_1_rank_0.json.gz", "rollout_1_rank_1.json.gz"}
    assert (command.run_dir / "hf" / "config.json").exists()
