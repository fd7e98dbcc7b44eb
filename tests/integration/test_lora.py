"""A complete run that trains LoRA adapters."""

import pytest

from tests.integration.conftest import Command

pytestmark = pytest.mark.slow


def test_engines_get_the_merged_weights_and_the_export_has_model_and_adapter(command: Command) -> None:
    overrides = ("cluster.actor_num_gpus_per_node=2", "reward.type=random", "optim.lr=1e-2", "eval.interval=null")
    done = command.run("train.lora.rank=4", *overrides)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["train/grad_norm"] > 0 for m in trained)
    assert all(m["logprob_diff/mean"] < 1e-4 for m in trained)
    adapter = command.run_dir / "hf" / "adapter"
    assert (adapter / "adapter_config.json").is_file() and (adapter / "adapter_model.safetensors").is_file()
    assert (command.run_dir / "hf" / "model.safetensors").is_file()
