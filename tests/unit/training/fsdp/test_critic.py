"""Policy and critic on one rank."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.algo.advantages import gae
from rlscale.algo.ragged import TokenLayout
from rlscale.config import LoraConfig
from rlscale.errors import DataError
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import CriticSpec, ModelSource
from rlscale.types import TrainBatch, TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_model

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
ONE = [[[*range(8)]]]
TWO_STEPS = [[[[0, 1, 2], [3]]], [[[4, 5], [6, 7]]]]
PPO = {"advantage_estimator": "ppo", "lambd": 0.95, "gamma": 0.99}


def backend(model_path: str, *, algo: dict[str, Any] | None = None, **critic: Any) -> FsdpBackend:
    own = CriticSpec(**{"source": ModelSource(path=model_path), "lr": 1e-2, **critic})
    return FsdpBackend(spec(model_path, algo={**PPO, **(algo or {})}, critic=own), rank=0, world_size=1)


def train(trainer: FsdpBackend, batch: TrainBatch = BATCH, cuts: Any = None) -> TrainResult:
    return trainer.train(batch, [plan(batch, cut) for cut in (cuts or [ONE])])


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_first_values_are_0_and_the_losses_those_of_plain_returns(model_path: str) -> None:
    step = train(backend(model_path, algo={"gamma": 1.0, "lambd": 1.0})).steps[0]
    # With values of 0 the return of every token is the reward of its sample.
    counts = np.diff(BATCH.offsets) - BATCH.prompt_lens
    assert step["critic_value_mean"] == 0.0
    assert step["critic_loss"] == pytest.approx(np.square(BATCH.rewards).mean(), rel=1e-5)
    assert step["loss"] == pytest.approx(-BATCH.rewards.mean(), rel=1e-5)
    assert step["critic_value_error"] == pytest.approx((np.square(BATCH.rewards) * counts).sum() / counts.sum())


def test_values_are_the_heads_product_at_the_position_before_each_token(model_path: str) -> None:
    trainer = backend(model_path)
    train(trainer)  # moves the head away from 0
    assert trainer.critic is not None
    _, columns = trainer.prepare(BATCH, [plan(BATCH, ONE)])
    named = {name: p.detach() for name, p in trainer.critic.model.named_parameters()}  # one rank holds all
    model = load_causal_lm(model_path, dtype=torch.float32)
    model.load_state_dict({n: w for n, w in named.items() if n != "lm_head.weight"}, strict=False)
    assert columns.values is not None
    for i in (0, 3, 5):
        start, stop, prompt = int(BATCH.offsets[i]), int(BATCH.offsets[i + 1]), int(BATCH.prompt_lens[i])
        ids = torch.from_numpy(BATCH.tokens[start:stop].astype(np.int64))
        with torch.no_grad():
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
        # The value before a token is of the position before it.
        expected = (hidden @ named["lm_head.weight"].T)[prompt - 1 : -1, 0]
        torch.testing.assert_close(columns.values[start + prompt : stop], expected, atol=1e-5, rtol=1e-4)


def test_advantages_and_returns_are_those_of_gae(model_path: str) -> None:
    trainer = backend(model_path)
    train(trainer)
    _, columns = trainer.prepare(BATCH, [plan(BATCH, ONE)])
    rows = torch.from_numpy(np.flatnonzero(BATCH.loss_mask))
    lengths = torch.from_numpy(BATCH.lengths - BATCH.prompt_lens)
    layout = TokenLayout.from_lengths(torch.ones(len(rows), dtype=torch.bool), lengths_S=lengths)
    # The reward of a sample is at its last token.
    rewards = torch.zeros(len(rows))
    rewards[lengths.cumsum(0) - 1] = torch.from_numpy(BATCH.rewards)
    assert columns.values is not None and columns.advantages is not None and columns.returns is not None
    advantages, returns = gae(rewards, values_T=columns.values[rows], layout=layout, gamma=0.99, lambd=0.95)
    torch.testing.assert_close(columns.advantages[rows], advantages)
    torch.testing.assert_close(columns.returns[rows], returns)


@pytest.mark.slow
def test_the_critic_learns_to_predict_the_rewards(model_path: str) -> None:
    trainer = backend(model_path, algo={"lambd": 1.0, "gamma": 1.0})
    errors = [train(trainer).steps[0]["critic_value_error"] for _ in range(25)]
    assert errors[-1] < 0.2 * errors[0]


@pytest.mark.slow
def test_a_cut_into_micro_batches_changes_nothing(model_path: str) -> None:
    whole, split = backend(model_path), backend(model_path)
    for trainer in (whole, split):
        for group in trainer.critic.optimizer.param_groups + trainer.policy.optimizer.param_groups:  # type: ignore[union-attr]
            group["eps"] = 1e-4  # with a small eps Adam would turn the rounding of vanishing gradients into full steps
    for seed in range(2):
        batch = make_batch(RAGGED, seed=seed)
        expected, got = train(whole, batch).steps[0], train(split, batch, [[[[7, 3, 1, 5], [], [0, 2, 6, 4]]]]).steps[0]
        assert got == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_the_policy_is_unchanged_while_only_the_critic_trains(model_path: str) -> None:
    trainer = backend(model_path, num_only_rollouts=2)
    assert trainer.critic is not None
    before, critic = weights(trainer.policy.model), weights(trainer.critic.model)
    for _ in range(2):
        result = train(trainer, cuts=TWO_STEPS)
        assert all("critic_loss" in step and "loss" not in step for step in result.steps)
        assert {"optimize", "old_logprobs"}.isdisjoint(result.seconds)
    assert same(weights(trainer.policy.model), before)
    assert not same(weights(trainer.critic.model), critic)
    assert trainer.policy.num_steps == 0 and trainer.critic.num_steps == 4
    assert "loss" in train(trainer).steps[0]
    assert not same(weights(trainer.policy.model), before)


def test_the_critic_has_a_separate_rate_and_warm_up(model_path: str) -> None:
    trainer = backend(model_path, lr=4e-3, lr_warmup_iters=2)
    rates = [train(trainer).steps[0] for _ in range(3)]
    assert [step["critic_lr"] for step in rates] == pytest.approx([2e-3, 4e-3, 4e-3])
    assert [step["lr"] for step in rates] == pytest.approx([1e-2] * 3)


@pytest.mark.slow
def test_value_clip_bounds_the_change_of_a_value(model_path: str) -> None:
    free, bound = (backend(model_path, value_clip=clip, lr=1e-3) for clip in (100.0, 1e-4))
    losses = [train(trainer, cuts=[ONE, ONE, ONE]).steps[2] for trainer in (free, bound)]
    assert losses[0]["critic_value_clipfrac"] == 0.0
    assert losses[1]["critic_value_clipfrac"] > 0.5


@pytest.mark.slow
def test_a_resumed_critic_continues_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    first, second = backend(model_path, num_only_rollouts=1), backend(model_path, num_only_rollouts=1)
    train(first)
    train(first)
    first.save(tmp_path)
    second.load(tmp_path)
    assert train(second, cuts=TWO_STEPS).steps == train(first, cuts=TWO_STEPS).steps
    assert first.critic is not None and second.critic is not None
    assert same(weights(first.critic.model), weights(second.critic.model))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}


@pytest.mark.slow
def test_critic_save_keeps_as_many_checkpoints_as_the_run(model_path: str, tmp_path: Path) -> None:
    trainer = backend(model_path, save=tmp_path / "critics", keep_last=1)
    for number in range(1, 4):
        train(trainer)
        run = tmp_path / "run" / f"rollout_{number:08d}.saving"
        run.mkdir(parents=True)
        trainer.save(run)
        assert not (run / "critic").exists()
    # When the run writes a checkpoint, it still has the previous one.
    assert sorted(path.name for path in (tmp_path / "critics").iterdir()) == ["rollout_00000002", "rollout_00000003"]
    again = backend(model_path, save=tmp_path / "critics", keep_last=1)
    again.load(run.rename(run.with_suffix("")))
    assert train(again).steps == train(trainer).steps
    lost = backend(model_path, save=tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nowhere/rollout_00000003/trainer\.json must be a file of a trainer check"):
        lost.load(tmp_path / "run" / "rollout_00000003")


def test_patterns_that_name_only_layers_of_the_policy_let_the_value_head_learn(model_path: str) -> None:
    plain = spec(model_path, algo=PPO, critic=CriticSpec(source=ModelSource(path=model_path), lr=1e-2))
    layer = "layers.1.mlp"
    trainer = FsdpBackend(replace(plain, train=replace(plain.train, only_train_params=[layer])), rank=0, world_size=1)
    assert trainer.critic is not None
    before = weights(trainer.critic.model)
    first, second = train(trainer).steps[0], train(trainer).steps[0]
    assert first["critic_grad_norm"] > 0 and second["critic_value_mean"] != 0
    changed = {name for name, weight in weights(trainer.critic.model).items() if not torch.equal(weight, before[name])}
    assert changed == {"lm_head.weight", *(name for name in before if layer in name)}


@pytest.mark.slow
def test_a_critic_starts_from_a_folder_a_critic_or_a_policy(model_path: str, cache: Path, tmp_path: Path) -> None:
    other = tiny_model(cache, seed=1)
    trainer = backend(model_path, source=ModelSource(path=other))
    assert trainer.critic is not None
    loaded = dict(load_causal_lm(other, dtype=torch.float32).named_parameters())
    for name, weight in weights(trainer.critic.model).items():
        assert torch.equal(weight, loaded[name] if name != "lm_head.weight" else weight * 0)
    train(trainer)
    trainer.save(tmp_path)
    again = backend(model_path, source=ModelSource(path=model_path, checkpoint=tmp_path))
    assert again.critic is not None and again.critic.num_steps == 0
    assert same(weights(again.critic.model), weights(trainer.critic.model))
    # A run without a critic has the weights of the policy, below a new head.
    (tmp_path / "grpo").mkdir()
    grpo = FsdpBackend(spec(model_path), rank=0, world_size=1)
    train(grpo)
    grpo.save(tmp_path / "grpo")
    third = backend(model_path, source=ModelSource(path=model_path, checkpoint=tmp_path / "grpo"))
    assert third.critic is not None
    found = weights(third.critic.model)
    assert not found.pop("lm_head.weight").any()
    assert same(found, weights(grpo.policy.model))


def test_a_checkpoint_without_a_critic_keeps_its_initial_weights(model_path: str, tmp_path: Path) -> None:
    FsdpBackend(spec(model_path), rank=0, world_size=1).save(tmp_path)
    trainer = backend(model_path)
    trainer.load(tmp_path)
    assert train(trainer).steps == train(backend(model_path)).steps


def test_a_kl_penalty_enters_the_returns(model_path: str, cache: Path) -> None:
    plain = train(backend(model_path)).metrics["rollout/return"]
    algo = {**PPO, "kl_coef": 0.5, "kl_loss_type": "k2"}
    critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2)
    other = spec(model_path, algo=algo, critic=critic, ref_path=tiny_model(cache, seed=1))
    result = train(FsdpBackend(other, rank=0, world_size=1))
    assert result.metrics["rollout/return"] < plain - 1e-3
    assert "old_logprobs" in result.seconds and math.isfinite(result.steps[0]["critic_loss"])


def test_reusing_logprobs_equals_the_extra_pass(model_path: str) -> None:
    results = []
    for reuse in (True, False):
        critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2)
        made = spec(model_path, algo=PPO, critic=critic, reuse_logprobs=reuse)
        results.append(train(FsdpBackend(made, rank=0, world_size=1)))
    assert results[0].steps == results[1].steps
    assert ["old_logprobs" in result.seconds for result in results] == [False, True]


def test_a_sample_without_trainable_tokens_has_no_effect(model_path: str) -> None:
    mask = BATCH.loss_mask.copy()
    mask[BATCH.offsets[2] : BATCH.offsets[3]] = 0
    rewards = BATCH.rewards.copy()
    # With any effect such a reward would dominate the step.
    rewards[2] = 1e6
    masked = replace(BATCH, loss_mask=mask)
    loud = replace(masked, rewards=rewards)
    assert train(backend(model_path), masked).steps == train(backend(model_path), loud).steps


@pytest.mark.slow
def test_a_critic_next_to_adapters_trains_all_of_its_weights(model_path: str, tmp_path: Path) -> None:
    def made() -> FsdpBackend:
        critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2)
        return FsdpBackend(spec(model_path, algo=PPO, critic=critic, lora=LoraConfig(rank=4)), rank=0, world_size=1)

    first, second = made(), made()
    assert first.critic is not None
    policy, critic = weights(first.policy.model), weights(first.critic.model)
    for seed in range(2):
        train(first, make_batch(RAGGED, seed=seed))
    changed = {name for name, weight in weights(first.policy.model).items() if not torch.equal(weight, policy[name])}
    assert changed and all(".lora_" in name for name in changed)
    assert all(not torch.equal(weight, critic[name]) for name, weight in weights(first.critic.model).items())
    first.save(tmp_path)
    second.load(tmp_path)
    assert train(second, cuts=TWO_STEPS).steps == train(first, cuts=TWO_STEPS).steps
    assert second.critic is not None and same(weights(second.critic.model), weights(first.critic.model))
    assert same(weights(second.policy.model), weights(first.policy.model))
