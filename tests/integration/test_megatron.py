"""The real command with trainers on Megatron-core."""

from pathlib import Path

import pytest

from tests.integration.conftest import Command

TWO = ("cluster.actor_num_gpus_per_node=2", "train=megatron")
TENSOR = "megatron.tensor_model_parallel_size=2"
STAGES = "megatron.pipeline_model_parallel_size=2"


def test_two_tensor_parallel_ranks_and_the_engine_agree(command: Command) -> None:
    heads = ("model.num_attention_heads=4", "model.num_key_value_heads=2")
    # ci fails where engine and trainer differ in logprobs or version.
    done = command.run(*TWO, TENSOR, *heads, "ci.enabled=true", "data.num_rollout=2", "checkpoint.save_interval=1")
    assert done.code == 0, done.err
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert [record["weights/version"] for record in steps] == [1, 2]
    assert all(0 <= record["logprob_diff/mean"] < 1e-4 for record in steps)
    assert (command.run_dir / "hf" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("division", [TENSOR, STAGES])
def test_the_quickstart_learns(command: Command, warm: Path, division: str) -> None:
    """As far as it takes to know that it does; benchmarks/results/megatron_quickstart.md has whole runs."""
    ends = (f"checkpoint.load={warm}", "eval.stop_reward=0.65")
    done = command.run(*TWO, division, *ends, "ci.enabled=true", small=False, timeout_s=1200)
    assert done.code == 0, done.err
    rewards = held_out(command)
    assert rewards[-1] >= 0.65 > 0.4 > rewards[0], rewards


def held_out(command: Command) -> list[float]:
    return [record["eval/reward_mean"] for record in command.metrics() if "eval/reward_mean" in record]
