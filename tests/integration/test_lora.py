"""Complete runs that train LoRA adapters."""

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


@pytest.mark.parametrize(
    "layout",
    [(), pytest.param(("train=megatron", "megatron.pipeline_model_parallel_size=2"), marks=pytest.mark.nightly)],
    ids=["fsdp", "megatron"],
)
def test_engines_get_the_adapters_alone(command: Command, layout: tuple[str, ...]) -> None:
    overrides = (
        *layout,
        "cluster.actor_num_gpus_per_node=2",
        "reward.type=random",
        "optim.lr=1e-2",
        "eval.interval=null",
    )
    kl = ("algo.use_kl_loss=true", "algo.kl_loss_coef=0.01", "ci.enabled=true")
    done = command.run("train.lora.rank=4", "train.lora.sync=adapter", *overrides, *kl)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["train/grad_norm"] > 0 for m in trained)
    # An adapter that did not arrive, or was scaled twice, differs from the second rollout on.
    assert all(m["logprob_diff/mean"] < 1e-4 for m in trained)
    # The reference is the base: the policy moves away from it.
    assert abs(trained[0]["train/kl_loss"]) < 1e-6 < 1e-5 < abs(trained[2]["train/kl_loss"])
