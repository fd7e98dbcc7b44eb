"""Divergences over tokens from a teacher in the trainer: one step equals the loss of whole softmaxes in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.config import LoraConfig
from rlscale.models.hf_models import load_causal_lm
from rlscale.teacher_scores import TeacherScores
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.loss.policy_loss import PolicyLoss
from rlscale.training.metrics import MetricSums
from rlscale.training.modules.lora import find_adapters
from rlscale.training.rollout_state import PackedRollout
from rlscale.training.spec import ModelSource
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_model

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
TWO = [[[0, 5, 6, 1], [2, 3, 4, 7]]]
# Rewards of 0, and a mean over tokens: the gradient is that of the teacher alone.
QUIET = replace(BATCH, rewards=BATCH.rewards * 0)
COEF, TEMPERATURE, TOP = 0.5, 0.7, 3


def backend(path: str, teacher: str | None, kind: str, direction: str, **changes: Any) -> FsdpBackend:
    algo = {
        "opd_kl_coef": COEF,
        "opd_kl": kind,
        "opd_direction": direction,
        "opd_top_k": changes.pop("top_k", TOP),
        "calculate_per_token_loss": True,
    }
    source = None if teacher is None else ModelSource(path=teacher)
    made = replace(spec(path, algo=algo, teacher=source, **changes), temperature=TEMPERATURE)
    return FsdpBackend(made, rank=0, world_size=1)


def gradient(trainer: FsdpBackend, batch: TrainBatch = QUIET) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of the loss, and the gradient of one step, before the optimiser."""
    rollout, columns = trainer.prepare(batch, [plan(batch, TWO)])
    metrics = MetricSums(torch.device("cpu"))
    loss = PolicyLoss(trainer._spec, rollout, columns, step=0, metrics=metrics, device=torch.device("cpu"))
    trainer.policy._forward_backward(rollout.micros[0], loss=loss, metrics=metrics)
    return metrics.gather()[0], {n: p.grad for n, p in trainer.policy.model.named_parameters() if p.grad is not None}


def expected(path: str, teacher: str, kind: str, direction: str) -> tuple[float, dict[str, Tensor]]:
    """The mean divergence in float64, and its gradient."""
    models = [load_causal_lm(each, dtype=torch.float64) for each in (path, teacher)]
    total = torch.zeros((), dtype=torch.float64)
    for start, stop, prompt_len in zip(QUIET.offsets, QUIET.offsets[1:], QUIET.prompt_lens, strict=False):
        ids = torch.from_numpy(QUIET.tokens[start:stop]).long()[None]
        logits = [model(input_ids=ids).logits[0, prompt_len - 1 : -1] / TEMPERATURE for model in models]
        log_p, log_q = (torch.log_softmax(each, dim=-1) for each in logits)
        log_q = log_q.detach()
        if kind == "top_k":
            top = log_q.topk(TOP, dim=-1).indices
            probabilities = [x.exp() for x in (log_p, log_q)]
            log_p, log_q = (
                torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(-1, keepdim=True)], -1).log()
                for x in probabilities
            )
        pair = (log_q, log_p) if direction == "reverse" else (log_p, log_q)
        total = total + F.kl_div(*pair, log_target=True, reduction="sum")
    mean = total / int(QUIET.loss_mask.sum())
    (COEF * mean).backward()  # type: ignore[no-untyped-call]
    return float(mean), {n: p.grad for n, p in models[0].named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def teacher(cache: Path) -> str:
    """Another architecture than the policy."""
    return tiny_model(cache, seed=1, num_layers=3)


# In tiles of two tokens' logits, and with the logits of a micro-batch.
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, -1])
@pytest.mark.parametrize("kind", ["top_k", "full"])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_step_has_the_gradient_of_whole_softmaxes(
    model_path: str, teacher: str, chunk: int, kind: str, direction: str
) -> None:
    trainer = backend(model_path, teacher, kind, direction, log_probs_chunk_size=chunk)
    metrics, found = gradient(trainer)
    mean, exact = expected(model_path, teacher, kind, direction)
    assert metrics["teacher_kl"] == pytest.approx(mean, abs=1e-6) and mean > 1e-3
    assert found.keys() == exact.keys()
    for name, grad in exact.items():
        torch.testing.assert_close(found[name].double(), grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chunk", [2, -1])
@pytest.mark.parametrize("kind", ["top_k", "full"])
@pytest.mark.slow
def test_adapters_get_the_gradient_of_their_matrices(model_path: str, teacher: str, chunk: int, kind: str) -> None:
    lora = LoraConfig(rank=2, target_modules=["q_proj", "down_proj"])
    trainer = backend(model_path, teacher, kind, "reverse", log_probs_chunk_size=chunk, lora=lora)
    metrics, found = gradient(trainer)
    mean, exact = expected(model_path, teacher, kind, "reverse")
    assert metrics["teacher_kl"] == pytest.approx(mean, abs=1e-6)
    adapters = find_adapters(trainer.policy.model)
    assert len(found) == 2 * len(adapters) == 8
    for name, adapter in adapters.items():
        # W + scale * B A, where B is 0: the gradient of B is that of W times A, and A has none.
        grad_b = adapter.scale * exact[name] @ adapter.a.T.double()
        assert adapter.b.grad is not None and adapter.a.grad is not None
        torch.testing.assert_close(adapter.b.grad.double(), grad_b, atol=1e-6, rtol=1e-6)
        assert not adapter.a.grad.any()


@pytest.mark.parametrize("chunk", [2, -1])
@pytest.mark.parametrize("kind", ["top_k", "full"])
@pytest.mark.slow
def test_a_server_with_the_same_values_gives_the_same_step(
    model_path: str, teacher: str, chunk: int, kind: str
) -> None:
    loaded = backend(model_path, teacher, kind, "reverse", log_probs_chunk_size=chunk)
    metrics, found = gradient(loaded)
    whole = backend(model_path, teacher, "top_k", "reverse", top_k=10**6)
    rollout, columns = whole.prepare(QUIET, [plan(QUIET, TWO)])
    scores = _served(rollout, columns.teacher, num_top=None if kind == "full" else TOP)
    served = backend(model_path, None, kind, "reverse", log_probs_chunk_size=chunk)
    again, same = gradient(served, replace(QUIET, teacher=scores))
    assert again["teacher_kl"] == pytest.approx(metrics["teacher_kl"], abs=1e-6)
    for name, grad in found.items():
        torch.testing.assert_close(same[name], grad, atol=1e-6, rtol=1e-5)


def _served(rollout: PackedRollout, targets: Any, *, num_top: int | None) -> TeacherScores:
    """The most likely tokens of a teacher in the form of a server's answers."""
    ids, logprobs = (targets.columns[name][:, :num_top].numpy() for name in ("top_ids", "top_logprobs"))
    columns = {}
    for name, values in (("top_ids", ids), ("top_logprobs", logprobs)):
        whole = torch.zeros(rollout.num_tokens, values.shape[1]).numpy().astype(values.dtype)
        whole[targets.rows] = values
        columns[name] = whole
    return TeacherScores(logprobs=torch.zeros(rollout.num_tokens).numpy(), **columns)


def test_the_output_layer_of_the_teacher_is_freed_after_the_steps(model_path: str, teacher: str) -> None:
    trainer = backend(model_path, teacher, "full", "reverse")
    rollout, columns = trainer.prepare(QUIET, [plan(QUIET, TWO)])
    assert columns.teacher is not None and columns.teacher.weight is not None
    trainer._optimize(rollout, columns)
    assert columns.teacher.weight is None and not columns.teacher.columns


@pytest.mark.slow
def test_the_policy_itself_is_at_a_distance_of_0(model_path: str) -> None:
    for kind in ("top_k", "full"):
        metrics, grads = gradient(backend(model_path, model_path, kind, "reverse", log_probs_chunk_size=2))
        assert metrics["teacher_kl"] == pytest.approx(0.0, abs=1e-6)
        assert all(float(grad.abs().max()) < 1e-5 for grad in grads.values())
