"""Small runs of the presets that train with Muon."""

import pytest
from safetensors import safe_open

from tests.integration.conftest import Command

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("experiment", ["nanochat_sft", "nanochat_rl"])
def test_the_nanochat_presets_train_with_muon(command: Command, experiment: str) -> None:
    overrides = ("checkpoint.save_interval=2", "eval.interval=2", "batch.rollout_batch_size=4")
    # The random model is never right; the other rewards would be 0.
    extra = {
        # At an evaluation the engine releases the GPU to the trainer, which computes the loss of the labels.
        "nanochat_sft": ("batch.n_samples_per_prompt=1", "batch.balance_data=true", "cluster.colocate=true"),
        "nanochat_rl": ("reward.type=random",),
    }[experiment]
    done = command.run(f"experiment={experiment}", "+on=cpu", *overrides, *extra)
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["train/grad_norm"] > 0 for m in trained)
    rates = [m["train/lr"] for m in trained]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1] > 0  # linear decay to 0 at the fourth step
    moments: dict[str, set[str]] = {}
    newest = sorted(command.run_dir.glob("checkpoints/rollout_*"))[-1]
    for file in newest.rglob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # not a mapping
                moments.setdefault(key.split(".")[0], set()).add(key.split(".", 1)[1])
    assert all("proj" in name for name in moments["momentum_buffer"]) and moments["momentum_buffer"]
    assert "model.embed_tokens.weight" in moments["exp_avg"] and not moments["exp_avg"] & moments["momentum_buffer"]
    losses = [m["eval/arithmetic/loss"] for m in command.metrics() if "eval/arithmetic/loss" in m]
    assert len(losses) == (3 if experiment == "nanochat_sft" else 0)  # eval.num_batches
    assert losses == sorted(losses, reverse=True)
    config = (command.run_dir / "config.yaml").read_text()
    assert "name: muon" in config and "embedding_lr: 0.2" in config


def test_nanochat_rl_improves_the_small_model(command: Command) -> None:
    done = command.run("+experiment=nanochat_rl", "+on=cpu", small=False)
    assert done.code == 0, done.err
    records = command.metrics()
    held_out = [record["eval/reward_mean"] for record in records if "eval/reward_mean" in record]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    # The tied table must not use the embedding's learning rate: the reward falls from 0.14 to 0.03 in four rollouts.
    assert len(rewards) == 20 and held_out[-1] > held_out[0] > 0.2
    assert min(rewards[4:]) > 0.1
