"""Complete runs that train LoRA adapters."""

from pathlib import Path

import pytest

from tests.integration.conftest import Command

pytestmark = pytest.mark.slow


def test_adapters_learn_with_merged_weights_and_the_export_has_model_and_adapter(command: Command, warm: Path) -> None:
    """Forty steps at a rate that falls from 1.3 times the best constant one of docs/how-to/lora-rates.md to 0."""
    given = ("+experiment=quickstart", f"checkpoint.load={warm}", "train.lora.rank=8", "train.lora.alpha=32")
    rate = ("optim.lr=2e-3", "optim.lr_warmup_iters=5")
    length = ("batch.rollout_batch_size=24", "data.num_rollout=40", "eval.interval=40", "eval.stop_reward=null")
    done = command.run(*given, *rate, *length, small=False)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 40 and all(m["logprob_diff/mean"] < 1e-4 for m in trained)
    # Three seeds reach 0.77 to 0.84; the standard error of an evaluation is 0.03.
    first, last = (m["eval/reward_mean"] for m in command.metrics() if "eval/reward_mean" in m)
    assert first <= 0.4 and last >= 0.65
    adapter = command.run_dir / "hf" / "adapter"
    assert (adapter / "adapter_config.json").is_file() and (adapter / "adapter_model.safetensors").is_file()
    assert (command.run_dir / "hf" / "model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", [(), ("train=megatron", "megatron.pipeline_model_parallel_size=2")], ids=["fsdp", "megatron"]
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


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [0, 1])
def test_real_sglang_gets_the_adapters_alone(command: Command, staleness: int) -> None:
    """With rollouts ahead of the trainer, requests of a version run while the next one is loaded."""
    given = ("rollout=sglang", "train.lora.rank=4", "train.lora.sync=adapter", f"rollout.max_staleness={staleness}")
    done = command.run(*given, "reward.type=random", "optim.lr=1e-2", "eval.interval=null", "ci.enabled=true")
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["train/grad_norm"] > 0 for m in trained)
    assert [m["staleness/max"] for m in trained] == [0, staleness, staleness]
    # Tokens of older versions are not compared. The adapter of version 0 has no effect, those of 1 and 2 have.
    assert all(m["logprob_diff/mean"] < 1e-4 for m in trained if m["staleness/max"] == 0)
    log = (command.run_dir / "logs" / "engine_0_server.log").read_text(errors="replace")
    assert all(f"Lora name=policy@{version}" in log for version in range(3)) and "adapter sync OK" in log
    # One version more than requests may use stays.
    assert log.count("Start unload Lora adapter") == 2 - staleness
