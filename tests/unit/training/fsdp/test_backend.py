"""Training steps of the FSDP2 backend on one rank: metrics, weights and options."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlscale.config import ComputeDtype, LossType, MisConfig
from rlscale.errors import ConfigError, WorkerError
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.step import backward, compute_logits, iterate_micros, optim_step
from rlscale.training.loss.column_outputs import METRIC_NAMES
from rlscale.training.metrics import MetricSums
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch, pack
from rlscale.training.spec import CriticSpec, ModelSource
from rlscale.types import TrainBatch, TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_latent, tiny_model, tiny_moe

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
ONE = [[[*range(8)]]]
TWO_STEPS = [[[[0, 1, 2], [3]]], [[[4, 5], [6, 7]]]]


def backend(model_path: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(spec(model_path, **changes), rank=0, world_size=1)


def train(trainer: FsdpBackend, batch: TrainBatch = BATCH, cuts: Any = None) -> TrainResult:
    return trainer.train(batch, [plan(batch, cut) for cut in (cuts or [ONE])])


def weights(trainer: FsdpBackend) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights()}


def with_logprobs_of(batch: TrainBatch, model_path: str) -> TrainBatch:
    """The batch with exact logprobs of the engine."""
    model = load_causal_lm(model_path, dtype=torch.float32)
    column = batch.rollout_logprobs.copy()
    with torch.no_grad():
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))
            # Logits at position t predict token t + 1.
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            column[start + 1 : stop] = logprobs.numpy()
    return replace(batch, rollout_logprobs=column * batch.loss_mask)


def test_weights_of_the_checkpoint_have_hugging_face_names(model_path: str) -> None:
    got = weights(backend(model_path))
    expected = dict(load_causal_lm(model_path, dtype=torch.float32).named_parameters())
    assert list(got) == list(expected)
    assert "lm_head.weight" not in got  # tied
    for name, weight in got.items():
        assert torch.equal(weight, expected[name]), name


def test_experts_are_published_separately_and_trained(cache: Path, tmp_path: Path) -> None:
    path = tiny_moe(cache)
    saved = load_file(Path(path) / "model.safetensors")
    trainer = backend(path)
    before = weights(trainer)
    assert before.keys() == saved.keys()
    assert all(torch.equal(before[name], saved[name]) for name in saved)
    train(trainer)
    after = weights(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    trainer.export_hf(tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == after.keys()
    assert all(torch.equal(exported[name], after[name]) for name in after)
    again = backend(path)
    train(again)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(again).items())


@pytest.mark.slow
def test_the_bias_of_a_router_is_published_and_not_trained(cache: Path, tmp_path: Path) -> None:
    path, name = tiny_latent(cache), "model.layers.1.mlp.gate.e_score_correction_bias"
    trainer, bias = backend(path, dtype=ComputeDtype.bfloat16), torch.linspace(-0.5, 0.5, 8)
    dict(trainer.policy.model.named_buffers())[name].copy_(bias)
    train(trainer)
    got = weights(trainer)
    assert torch.equal(got[name], bias), "in float32, and as it was"
    assert got.keys() == load_file(Path(path) / "model.safetensors").keys()
    trainer.export_hf(tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")[name], bias)


def test_weights_have_the_dtype_of_the_engines(model_path: str) -> None:
    assert {w.dtype for w in weights(backend(model_path, dtype=ComputeDtype.bfloat16)).values()} == {torch.bfloat16}


def test_a_step_changes_every_weight_and_reports_metrics(model_path: str) -> None:
    trainer = backend(model_path)
    before, result, after = weights(trainer), train(trainer), weights(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    (step,) = result.steps
    assert step["lr"] == 1e-2
    assert step["grad_norm"] > 0
    assert step["ratio_mean"] == 1.0
    assert step["kl"] == 0.0
    assert 0 < step["entropy"] <= np.log(trainer.policy.model.config.vocab_size)
    assert set(result.seconds) == {"optimize"}  # no extra pass


def test_learning_rate_zero_changes_nothing(model_path: str) -> None:
    trainer = backend(model_path, lr=0.0)
    before = weights(trainer)
    train(trainer)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())


@pytest.mark.parametrize(
    "cut", [[[[0], [1], [2], [3], [4], [5], [6], [7]]], [[[7, 3, 1, 5], [], [0, 2, 6, 4]]]], ids=["singles", "empty"]
)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.slow
def test_micro_batches_do_not_change_three_steps(model_path: str, cut: Any, per_token: bool) -> None:
    algo = {"calculate_per_token_loss": per_token, "entropy_coef": 0.01}
    # With the default eps Adam turns the rounding of a gradient of 1e-8 into a full step.
    whole, split = (backend(model_path, algo=algo, adam_eps=1e-4) for _ in range(2))
    for seed in range(3):
        batch = make_batch(RAGGED, seed=seed)
        expected, got = train(whole, batch).steps[0], train(split, batch, [cut]).steps[0]
        assert got == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for (name, a), (_, b) in zip(whole.weights(), split.weights(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo"])
def test_reusing_logprobs_equals_the_extra_pass_bit_for_bit(model_path: str, estimator: str) -> None:
    algo = {"advantage_estimator": estimator, "use_tis": True}
    reused, extra = backend(model_path, algo=algo), backend(model_path, algo=algo, reuse_logprobs=False)
    cut = [[[[0, 1, 2, 3], [4, 5, 6, 7]]]]
    a, b = train(reused, cuts=cut), train(extra, cuts=cut)
    assert a.steps == b.steps
    assert a.metrics == b.metrics
    assert "old_logprobs" in b.seconds
    assert "old_logprobs" not in a.seconds
    other = weights(extra)
    assert all(torch.equal(weight, other[name]) for name, weight in weights(reused).items())


def test_the_decoupled_loss_weights_stale_tokens(model_path: str) -> None:
    exact = with_logprobs_of(BATCH, model_path)
    stale = slice(int(exact.offsets[4]), int(exact.offsets[5]))
    logprobs = exact.rollout_logprobs.copy()
    logprobs[stale] -= np.log(2.0).astype(np.float32) * exact.loss_mask[stale]  # of a policy with half the probability
    batch = replace(exact, rollout_logprobs=logprobs)
    plain, decoupled = backend(model_path), backend(model_path, algo={"decoupled_loss": True})
    a, b = train(plain, batch).steps[0], train(decoupled, batch).steps[0]
    # Stale tokens have the weight 2, all others 1.
    count, all_tokens = exact.loss_mask[stale].sum(), exact.loss_mask.sum()
    assert b["decoupled_mean"] == pytest.approx(1 + count / all_tokens, rel=1e-4)
    assert b["decoupled_clipfrac"] == 0.0
    assert b["grad_norm"] != pytest.approx(a["grad_norm"], rel=1e-3)
    assert "decoupled_mean" not in a
    bounded = backend(model_path, algo={"decoupled_loss": True, "decoupled_weight_max": 1.5})
    assert train(bounded, batch).steps[0]["decoupled_clipfrac"] == pytest.approx(count / all_tokens)


def test_several_steps_move_away_from_the_old_policy(model_path: str) -> None:
    result = train(backend(model_path), cuts=[*TWO_STEPS, ONE])
    assert len(result.steps) == 3
    assert result.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.steps[2]["kl"] > 1e-4
    assert "old_logprobs" in result.seconds


def test_logprob_difference_is_zero_for_an_exact_engine(model_path: str) -> None:
    exact = with_logprobs_of(BATCH, model_path)
    for changes in ({}, {"reuse_logprobs": False}, {"algo": {"use_rollout_logprobs": True}}):
        metrics = train(backend(model_path, **changes), exact).metrics
        assert metrics["logprob_diff/mean"] < 1e-5
        assert metrics["logprob_diff/max"] < 1e-5
        assert "logprob_diff/stale_mean" not in metrics


def test_stale_tokens_are_compared_separately(model_path: str) -> None:
    exact = with_logprobs_of(BATCH, model_path)
    stale = slice(int(exact.offsets[4]), int(exact.offsets[5]))  # all of sample 4 is of version 6, the rest of 7
    versions, logprobs = np.where(exact.loss_mask, 7, -1).astype(np.int32), exact.rollout_logprobs.copy()
    versions[stale] = np.where(exact.loss_mask[stale], 6, -1)
    logprobs[stale] += 0.5 * exact.loss_mask[stale]
    metrics = train(
        backend(model_path), replace(exact, weight_versions=versions, rollout_logprobs=logprobs, version=7)
    ).metrics
    assert metrics["logprob_diff/mean"] < 1e-5
    assert metrics["logprob_diff/max"] < 1e-5
    assert metrics["logprob_diff/stale_mean"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_diff/stale_k1"] == pytest.approx(0.5, abs=1e-5)


def test_reference_starts_equal_and_stays_behind(model_path: str) -> None:
    algo = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}
    trainer = backend(model_path, algo=algo, ref_path=model_path)
    first, second = train(trainer).steps[0], train(trainer).steps[0]
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl_loss"] > 1e-4


def test_another_reference_gives_a_kl_from_the_start(model_path: str, cache: Path) -> None:
    trainer = backend(model_path, algo={"use_kl_loss": True, "kl_loss_type": "k2"}, ref_path=tiny_model(cache, seed=1))
    assert train(trainer).steps[0]["kl_loss"] > 1e-4


def test_supervised_loss_falls_without_engine_logprobs(model_path: str) -> None:
    trainer = backend(model_path, algo={"loss_type": LossType.sft_loss})
    results = [train(trainer) for _ in range(15)]
    assert results[-1].steps[0]["loss"] < 0.7 * results[0].steps[0]["loss"]
    assert results[0].metrics == {}


def test_bfloat16_runs_close_to_float32_on_float32_weights(model_path: str) -> None:
    low, full = backend(model_path, dtype=ComputeDtype.bfloat16), backend(model_path)
    a, b = train(low).steps[0], train(full).steps[0]
    assert a["entropy"] == pytest.approx(b["entropy"], rel=0.02)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.1)
    assert {p.dtype for p in low.policy.model.parameters()} == {torch.float32}


def _pack_all(trainer: FsdpBackend, batch: TrainBatch) -> Microbatch:
    return trainer.rank.pack(batch, range(batch.num_samples))


def test_sharing_prompts_gives_the_same_step_up_to_rounding(model_path: str) -> None:
    tokens = BATCH.tokens.copy()
    length = int(BATCH.prompt_lens.min())
    assert length > 1
    # All samples get one prompt of the shortest length, so packing saves 7 of the 8 copies.
    equal = replace(BATCH, tokens=tokens, prompt_lens=np.full_like(BATCH.prompt_lens, length))
    for start in BATCH.offsets[:-1]:
        tokens[start : start + length] = tokens[:length]
    trainers = [backend(model_path, share_prompts=each) for each in (True, False)]
    sizes = [_pack_all(trainer, equal).input_ids.shape[1] for trainer in trainers]
    assert sizes[0] <= sizes[1] - 7 * length and sizes[1] == len(tokens), "the key has an effect"
    shared, whole = (train(trainer, equal) for trainer in trainers)
    for name, value in whole.steps[0].items():
        assert shared.steps[0][name] == pytest.approx(value, abs=1e-5)


def test_gradient_checkpointing_changes_no_number(model_path: str) -> None:
    plain, saving = backend(model_path), backend(model_path, gradient_checkpointing=True)
    for _ in range(2):
        assert train(saving).steps == train(plain).steps


def test_clipping_bounds_the_update_and_reports_the_norm_before(model_path: str) -> None:
    free, bound = backend(model_path, clip_grad=0.0), backend(model_path, clip_grad=1e-3)
    norm = train(free).steps[0]["grad_norm"]
    assert train(bound).steps[0]["grad_norm"] == norm > 1e-3
    # The first moment is proportional to the gradient after clipping.
    for (name, a), (_, b) in zip(
        free.policy.model.named_parameters(), bound.policy.model.named_parameters(), strict=True
    ):
        moment, clipped = free.policy.optimizer.state[a]["exp_avg"], bound.policy.optimizer.state[b]["exp_avg"]
        torch.testing.assert_close(clipped, moment * (1e-3 / norm), msg=name, rtol=1e-3, atol=1e-9)


def test_a_nan_loss_stops_every_rank_and_names_step_and_rank(model_path: str) -> None:
    trainer = backend(model_path)
    train(trainer)
    # In place: the loss is NaN at the next step, number 1.
    dict(trainer.policy.model.named_parameters())["model.norm.weight"].data.mul_(float("nan"))
    with pytest.raises(WorkerError, match=r"rank 0: the loss of optimiser step 1 must be finite, got nan"):
        train(trainer)


def test_a_nan_gradient_names_the_parameter_and_changes_no_weight(model_path: str) -> None:
    trainer = backend(model_path)
    before = weights(trainer)
    batch = pack(BATCH, [0], device=torch.device("cpu"))
    model, metrics = trainer.policy.model, MetricSums(torch.device("cpu"))
    for micro in iterate_micros(model, [batch]):
        # 0, with the gradient 0 * inf.
        backward((compute_logits(model, micro) * 0).abs().sum().sqrt(), micro, metrics=metrics)
    with pytest.raises(
        WorkerError, match=r"gradient norm of optimiser step 5 .* got nan .*first is model\.embed_tokens"
    ):
        settings = StepSettings(number=5, lr=1.0, max_grad_norm=1.0)
        optim_step(model, trainer.policy.optimizer, metrics=metrics, settings=settings)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())


@pytest.mark.parametrize(
    ("algo", "cuts", "missing"),
    [
        ({}, None, ()),
        ({}, TWO_STEPS, ()),
        ({"use_rollout_logprobs": True}, TWO_STEPS, (5,)),  # in the second step the weights have changed
        ({"loss_type": LossType.sft_loss}, None, ()),
    ],
    ids=["from the training pass", "from the old-logprob pass", "only of the first step", "sft"],
)
@pytest.mark.slow
def test_requested_logprobs_are_of_the_initial_weights(
    model_path: str, algo: dict[str, Any], cuts: Any, missing: tuple[int, ...]
) -> None:
    exact = with_logprobs_of(BATCH, model_path)
    requested = (1, 2, 5)
    plain = train(backend(model_path, algo=algo), BATCH, cuts)
    result = train(backend(model_path, algo=algo), replace(BATCH, logprob_samples=requested), cuts)
    assert (result.steps, result.metrics) == (plain.steps, plain.metrics)  # to the last bit
    assert plain.logprobs == {}
    assert tuple(result.logprobs) == requested
    for i, values in result.logprobs.items():
        expected = exact.rollout_logprobs[BATCH.offsets[i] + BATCH.prompt_lens[i] : BATCH.offsets[i + 1]]
        if i in missing:
            assert np.isnan(values).all()
        else:
            np.testing.assert_allclose(values, expected, atol=1e-5)


COLUMN_CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "grpo": ({}, {"advantages"}),
    "two steps": ({"reuse_logprobs": False}, {"advantages", "old_logprobs"}),
    "critic": (
        {"algo": {"advantage_estimator": "ppo", "kl_coef": 0.1}, "critic": True, "ref_path": True},
        {"advantages", "returns", "values", "old_logprobs", "ref_logprobs"},
    ),
}


@pytest.mark.parametrize("case", COLUMN_CASES)
@pytest.mark.slow
def test_requested_columns_are_those_of_the_training(model_path: str, case: str) -> None:
    changes, names = COLUMN_CASES[case]
    changes = dict(changes)
    if changes.pop("critic", False):
        changes["critic"] = CriticSpec(source=ModelSource(path=model_path), lr=1e-2)
    if changes.pop("ref_path", False):
        changes["ref_path"] = model_path
    batch = with_logprobs_of(BATCH, model_path)
    plain = train(backend(model_path, **changes), batch)
    result = train(backend(model_path, **changes), replace(batch, returns_columns=True))
    assert plain.columns == {} and (result.steps, result.metrics) == (plain.steps, plain.metrics)
    assert result.columns.keys() == names
    trained = batch.loss_mask > 0
    samples = np.searchsorted(batch.offsets, np.flatnonzero(trained), side="right") - 1
    for name, column in result.columns.items():
        assert column.shape == batch.tokens.shape and not column[~trained].any()
        # The metric is the mean over trajectories of their means.
        means = [column[trained][samples == i].mean() for i in range(batch.num_samples) if (samples == i).any()]
        assert result.metrics[f"rollout/{METRIC_NAMES[name]}"] == pytest.approx(np.mean(means), abs=1e-6)
    if "old_logprobs" in names:
        np.testing.assert_allclose(result.columns["old_logprobs"], batch.rollout_logprobs, atol=1e-5)


def test_requested_logprobs_exclude_untrained_tokens(model_path: str) -> None:
    # The second response token of sample 3, e.g. of a tool.
    mask = BATCH.loss_mask.copy()
    mask[BATCH.offsets[3] + BATCH.prompt_lens[3] + 1] = 0
    result = train(backend(model_path), replace(BATCH, loss_mask=mask, logprob_samples=(3,)))
    assert np.isnan(result.logprobs[3]).tolist() == [False, True, False, False]


PENALTY = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.5}


def test_a_kl_penalty_needs_old_and_reference_before_the_loss(model_path: str, cache: Path) -> None:
    other = tiny_model(cache, seed=1)
    far, near = (backend(model_path, algo=PENALTY, ref_path=path) for path in (other, model_path))
    result, same = train(far), train(near)
    assert {"old_logprobs", "ref_logprobs"} <= set(result.seconds)
    assert abs(result.metrics["rollout/kl"]) > 1e-3
    assert same.metrics["rollout/kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.steps[0]["grad_norm"] != pytest.approx(same.steps[0]["grad_norm"], rel=1e-3)
    assert "kl_loss" not in result.steps[0]
    without = train(backend(model_path, algo={**PENALTY, "kl_coef": 0.0}))
    assert set(without.seconds) == {"optimize"}
    assert without.steps[0]["grad_norm"] == pytest.approx(same.steps[0]["grad_norm"], rel=1e-4)


def test_a_kl_penalty_with_the_engines_logprobs_needs_no_old_pass(model_path: str) -> None:
    algo = {**PENALTY, "use_rollout_logprobs": True}
    exact = with_logprobs_of(BATCH, model_path)
    result = train(backend(model_path, algo=algo, ref_path=model_path), exact)
    assert "old_logprobs" not in result.seconds
    assert result.metrics["rollout/kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("cuts", [None, TWO_STEPS], ids=["one step", "two steps"])
@pytest.mark.parametrize("algo", [{}, {"use_rollout_logprobs": True}], ids=["trainer", "engine"])
@pytest.mark.slow
def test_the_entropy_before_training_is_reported(model_path: str, cuts: Any, algo: dict[str, Any]) -> None:
    trainer = backend(model_path, algo={**algo, "use_rollout_entropy": True})
    result, plain = train(trainer, cuts=cuts), train(backend(model_path, algo=algo), cuts=cuts)
    first = train(backend(model_path)).steps[0]["entropy"]  # of the same weights on all samples
    assert result.metrics["rollout/entropy"] == pytest.approx(first, rel=1e-5)
    assert "rollout/entropy" not in plain.metrics
    assert ("old_logprobs" in result.seconds) is (cuts is not None)
    assert result.steps == plain.steps


MIS = {"use_tis": True, "tis_type": "mis", "tis_clip": 4.0}


def test_normalised_weights_have_mean_one_over_the_rollout(model_path: str) -> None:
    # Every token is twice as likely under the trainer as under the engine: all weights are 2, or 1 when normalised.
    exact = with_logprobs_of(BATCH, model_path)
    shifted = exact.rollout_logprobs - np.log(2.0).astype(np.float32) * exact.loss_mask
    batch = replace(exact, rollout_logprobs=shifted)
    plain = train(backend(model_path, algo={}), batch)
    doubled = train(backend(model_path, algo={**MIS, "mis": MisConfig()}), batch)
    scaled = train(backend(model_path, algo={**MIS, "mis": MisConfig(normalize=True)}), batch)
    norms = [result.steps[0]["grad_norm"] for result in (plain, doubled, scaled)]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-3)
    assert norms[2] == pytest.approx(norms[0], rel=1e-3)
    assert doubled.steps[0]["mis_weight"] == pytest.approx(2.0, rel=1e-3)
    assert "old_logprobs" in scaled.seconds and "old_logprobs" not in doubled.seconds


def test_dr_grpo_divides_by_the_longest_response(model_path: str) -> None:
    algo = {"divide_by_max_response_len": True}
    norms = [
        train(backend(model_path, algo=algo, max_response_len=length)).steps[0]["grad_norm"] for length in (70, 140)
    ]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4)


def test_overlong_responses_get_a_penalty(model_path: str) -> None:
    # Equal rewards have no advantages, unless a response of the last group is too long.
    batch = replace(BATCH, rewards=np.ones(8, dtype=np.float32))
    assert train(backend(model_path), batch).steps[0]["grad_norm"] == 0.0
    punished = backend(model_path, algo={"overlong_buffer_len": 40})
    assert train(punished, batch).steps[0]["grad_norm"] > 1e-3


@pytest.mark.slow
def test_a_step_without_a_trainable_token_changes_no_gradient(model_path: str) -> None:
    batch = replace(BATCH, loss_mask=np.zeros_like(BATCH.loss_mask))
    for algo in ({}, PENALTY, {**MIS, "mis": MisConfig(normalize=True)}, {"divide_by_max_response_len": True}):
        step = train(backend(model_path, algo=algo, ref_path=model_path), batch).steps[0]
        assert step["loss"] == 0.0 and step["grad_norm"] == 0.0, algo


@pytest.mark.slow
def test_a_custom_loss_without_advantages_makes_no_extra_pass(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def likelihood(lp, tokens):\n    assert tokens.advantages is None\n    return -lp, {}\n"
    (tmp_path / "loss_for_backend_test.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    algo = {"loss_type": LossType.custom_loss, "custom_loss_function_path": "loss_for_backend_test:likelihood"}
    custom = backend(model_path, algo={**algo, "compute_advantages_and_returns": False})
    supervised = backend(model_path, algo={"loss_type": LossType.sft_loss})
    for _ in range(2):
        result, expected = train(custom, cuts=TWO_STEPS), train(supervised, cuts=TWO_STEPS)
        assert result.steps == expected.steps
        assert set(result.seconds) == {"optimize"}


UPDATED_REFERENCE = {"use_kl_loss": True, "kl_loss_type": "k2", "ref_update_interval": 2}


def test_the_reference_is_updated_from_the_policy(model_path: str) -> None:
    trainer = backend(model_path, algo=UPDATED_REFERENCE, ref_path=model_path)
    # Updated after every second rollout: the distance is 0 at the next one.
    distances = [train(trainer).steps[0]["kl_loss"] for _ in range(4)]
    assert distances[0] == pytest.approx(0.0, abs=1e-9) and distances[2] == pytest.approx(0.0, abs=1e-9)
    assert distances[1] > 1e-4 and distances[3] > 1e-4


def test_a_reference_of_another_shape_cannot_be_updated(model_path: str, cache: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"algo\.ref_update_interval must be null with a reference model whose shape differs"
    ):
        backend(model_path, algo=UPDATED_REFERENCE, ref_path=tiny_model(cache, tied=False))


def changed(model_path: str, **train_changes: Any) -> set[str]:
    """Names of the weights that a step changes."""
    trainer = backend(model_path, **train_changes)
    before = weights(trainer)
    train(trainer)
    return {name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])}


def test_only_selected_parameters_are_trained(model_path: str) -> None:
    everything = set(weights(backend(model_path)))
    norms = {name for name in everything if "norm" in name}
    assert changed(model_path) == everything
    assert changed(model_path, only_train_params=["norm"]) == norms
    assert changed(model_path, freeze_params=["norm", "embed_tokens"]) == everything - norms - {
        "model.embed_tokens.weight"
    }


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"freeze_params": ["nosuch"]}, "train.freeze_params must have patterns that match a parameter name"),
        ({"freeze_params": ["."]}, "train.freeze_params must leave at least one parameter to train, got ."),
        (
            {"only_train_params": ["norm", "x{9}"]},
            "train.only_train_params must have patterns that match a parameter name",
        ),
    ],
)
def test_a_pattern_without_effect_raises(model_path: str, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        backend(model_path, **choice)


def moved(model_path: str, **changes: Any) -> dict[str, float]:
    """Largest change of each weight in one step of Adam, which is about its learning rate."""
    trainer = backend(model_path, **changes)
    before = weights(trainer)
    train(trainer)
    return {name: float((weight - before[name]).abs().max()) for name, weight in weights(trainer).items()}


def test_kinds_of_parameters_have_separate_learning_rates(model_path: str) -> None:
    plain = moved(model_path, lr=1e-3)
    chosen = moved(model_path, lr=1e-3, matrix_lr=4e-3, embedding_lr=0.0)
    for name, change in chosen.items():
        factor = 0.0 if "embed_tokens" in name else 1.0 if "norm" in name else 4.0
        assert change == pytest.approx(factor * plain[name], rel=0.05), name


def test_a_tied_table_has_the_smaller_rate_of_the_two(model_path: str, cache: Path) -> None:
    apart = tiny_model(cache, tied=False)
    for model, slow, fast in ((model_path, 2e-3, 2e-3), (apart, 2e-3, 0.02)):
        change = moved(model, lr=1e-3, embedding_lr=0.02, unembedding_lr=2e-3)
        assert change["model.embed_tokens.weight"] == pytest.approx(fast, rel=0.05)
        assert change.get("lm_head.weight", slow) == pytest.approx(slow, rel=0.05)


def test_init_lr_frac_scales_all_rates(model_path: str) -> None:
    whole, half = moved(model_path, lr=1e-3), moved(model_path, lr=1e-3, init_lr_frac=0.5)
    for name, change in half.items():
        assert change == pytest.approx(0.5 * whole[name], rel=0.05), name


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.slow
def test_the_loss_is_the_same_with_logits_in_chunks(model_path: str, chunk: int) -> None:
    whole, chunked = train(backend(model_path)), train(backend(model_path, log_probs_chunk_size=chunk))
    assert chunked.steps[0]["loss"] == pytest.approx(whole.steps[0]["loss"], rel=1e-5)
    assert chunked.steps[0]["grad_norm"] == pytest.approx(whole.steps[0]["grad_norm"], rel=1e-4)


def test_eval_loss_is_the_first_supervised_loss(model_path: str) -> None:
    trainer = FsdpBackend(
        spec(model_path, algo={"loss_type": "sft_loss", "calculate_per_token_loss": True}), rank=0, world_size=1
    )
    cuts = [plan(BATCH, [[[0, 1, 2], [3]]]), plan(BATCH, [[[4, 5], [6, 7]]])]
    measured = trainer.eval_loss(BATCH, cuts)
    before = weights(trainer)
    assert measured == pytest.approx(trainer.eval_loss(BATCH, [plan(BATCH, [[[*range(8)]]])]), rel=1e-6)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())
    assert trainer.train(BATCH, [plan(BATCH, [[[*range(8)]]])]).steps[0]["loss"] == pytest.approx(measured, rel=1e-6)
    assert trainer.eval_loss(BATCH, cuts) < measured
