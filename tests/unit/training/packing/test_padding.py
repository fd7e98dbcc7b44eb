"""Micro-batches of other sizes and padded rows change no metric."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.config import AttnImplementation, BatchConfig, QkvFormat
from rlscale.data.microbatch_plan import plan_steps
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.packing.microbatch import PaddedLayout, count_padding, pack, pad
from rlscale.types import TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_model, tiny_moe

pytestmark = pytest.mark.usefixtures("world")
BATCH = make_batch(RAGGED)
CPU = torch.device("cpu")
ALL_PASSES = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "entropy_coef": 0.01}


def trained(model_path: str, **changes: Any) -> TrainResult:
    made = spec(model_path, algo=ALL_PASSES, ref_path=model_path, reuse_logprobs=False, **changes)
    trainer = FsdpBackend(made, rank=0, world_size=1)
    return trainer.train(BATCH, [plan(BATCH, [[[0, 1, 2, 3], [4, 5, 6, 7]]])])


def assert_same(found: TrainResult, expected: TrainResult) -> None:
    assert found.steps[0] == pytest.approx(expected.steps[0], rel=1e-4, abs=1e-5)
    metrics = {name: value for name, value in found.metrics.items() if name != "rollout/padding"}
    assert metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


def test_passes_without_gradient_have_separate_micro_batches(model_path: str) -> None:
    made = spec(model_path, algo=ALL_PASSES, ref_path=model_path, reuse_logprobs=False)
    sizes = BatchConfig(rollout_batch_size=8, use_dynamic_batch_size=True, max_tokens_per_gpu=40)
    results, forwards = [], []
    for limit in (40, 200):
        sizes.log_probs_max_tokens_per_gpu = limit
        steps = plan_steps(BATCH, sizes, num_ranks=1)
        trainer = FsdpBackend(made, rank=0, world_size=1)
        # One entry per forward pass: True for passes with gradient.
        modes: list[bool] = []
        model = trainer.policy.model
        model.register_forward_pre_hook(lambda *_, modes=modes: modes.append(torch.is_grad_enabled()))
        results.append(trainer.train(BATCH, steps))
        forwards.append((modes.count(False), modes.count(True)))
    number = len(steps[0].microbatches[0])
    assert forwards == [(number, number), (1, number)] and number > 2
    assert_same(results[1], results[0])


@pytest.mark.parametrize("kernel", [AttnImplementation.sdpa, AttnImplementation.eager])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.slow
def test_padded_rows_have_the_metrics_of_packed_ones(cache: Path, kernel: AttnImplementation, tied: bool) -> None:
    model_path = tiny_model(cache, tied=tied)
    packed = trained(model_path)
    padded = trained(model_path, qkv_format=QkvFormat.bshd, attn_implementation=kernel)
    assert_same(padded, packed)
    widths = [max(p + r for p, r in RAGGED[:4]), max(p + r for p, r in RAGGED[4:])]
    slots = 4 * sum(widths)
    assert padded.metrics["rollout/padding"] == pytest.approx(1 - len(BATCH.tokens) / slots)
    assert "rollout/padding" not in packed.metrics


def test_padded_rows_with_experts_and_a_head_by_tiles(cache: Path) -> None:
    model_path = tiny_moe(cache)
    assert_same(trained(model_path, qkv_format=QkvFormat.bshd, log_probs_chunk_size=5), trained(model_path))


def test_rows_are_as_wide_as_the_longest_sample() -> None:
    micro = pad(BATCH, [0, 5, 2], device=CPU)
    assert micro.input_ids.shape == micro.position_ids.shape == (3, 76)
    assert micro.packing == PaddedLayout(num_tokens=5 + 76 + 11, num_slots=3 * 76)
    packed = pack(BATCH, [0, 5, 2], device=CPU)
    for name in ("targets", "sample_indices", "batch_rows"):
        assert getattr(micro, name).tolist() == getattr(packed, name).tolist()
    before = micro.input_ids.flatten()[micro.logit_rows]
    assert before.tolist() == packed.input_ids.flatten()[packed.logit_rows].tolist()
    assert count_padding([packed]) == {}
    share, slots = count_padding([micro, pad(BATCH, [], device=CPU)])["padding"]
    assert (share.item(), slots.item()) == (3 * 76 - 92, 3 * 76 + 1)
