"""A loss that reads logits: its gradient equals that of autograd through the plain model, with any output layer."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout, zero_masked
from rlscale.config import LossType
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.loss.policy_loss import PolicyLoss
from rlscale.training.metrics import MetricSums
from rlscale.types import TokenColumns
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
CUT = [[[0, 1, 2], [3, 4, 5, 6, 7]]]
TEMPERATURE = 0.8


def negative_entropy(
    logprobs: Tensor, tokens: TokenColumns, logits: Tensor
) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]:
    log_p = logits.log_softmax(-1)
    losses = zero_masked((log_p.exp() * log_p).sum(-1), mask_T=tokens.mask)
    return losses, {"seen": TokenLayout.from_columns(tokens).sum_and_count(logprobs)}


def gradients(model_path: str, **changes: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    algo = {"loss_type": LossType.custom_loss, "custom_loss_function_path": f"{__name__}:negative_entropy"}
    backend = FsdpBackend(spec(model_path, algo=algo, temperature=TEMPERATURE, **changes), rank=0, world_size=1)
    rollout, columns = backend.prepare(BATCH, [plan(BATCH, CUT)])
    metrics = MetricSums(torch.device("cpu"))
    loss = PolicyLoss(backend._spec, rollout, columns, step=0, metrics=metrics, device=torch.device("cpu"))
    backend.policy._forward_backward(rollout.micros[0], loss=loss, metrics=metrics)
    found = {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in backend.policy.model.named_parameters()
        if parameter.grad is not None
    }
    return found, metrics.gather()[0]


def expected(model_path: str) -> dict[str, Tensor]:
    model, total = load_causal_lm(model_path, dtype=torch.float32), torch.zeros(())
    for i, start in enumerate(BATCH.offsets[:-1]):
        ids = torch.from_numpy(BATCH.tokens[start : BATCH.offsets[i + 1]].astype("int64"))
        log_p = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        # Logits at position t predict token t + 1.
        rows = (log_p.exp() * log_p).sum(-1)[BATCH.prompt_lens[i] - 1 : -1]
        total = total + rows.mean() / BATCH.num_samples
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("changes", [{}, {"log_probs_chunk_size": 7}, {"recompute_loss_function": True}], ids=str)
def test_the_gradient_is_that_of_autograd(model_path: str, changes: dict[str, Any]) -> None:
    found, metrics = gradients(model_path, **changes)
    reference = expected(model_path)
    assert found.keys() == reference.keys()
    for name, gradient in reference.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert metrics["seen"] < 0
    assert sum(float(gradient.abs().sum()) for gradient in found.values()) > 0.1
