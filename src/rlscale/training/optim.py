"""The optimiser, and what is done to gradients before it steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.config import OptimConfig, OptimizerName

SCALE = "lr_scale"
"""Entry of a group of parameters: its learning rate as a multiple of `optim.lr`."""


def make_optimizer(model: PreTrainedModel, *, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters, fused. Weight decay applies to every one of them, norms included.

    Where `optim` has a learning rate for embedding, output layer or matrices, each kind is a group of its own.
    """
    assert optim.name == OptimizerName.adam, f"the config refuses optim.name={optim.name}"
    return torch.optim.AdamW(
        _groups(model, optim),
        lr=0.0,  # set before every step
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Sets the learning rate of the next step: of each group of parameters in its proportion."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[SCALE]


def _groups(model: PreTrainedModel, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trainable parameters by their learning rate, in the order of the model within each."""
    given = {"embedding": optim.embedding_lr, "unembedding": optim.unembedding_lr, "matrix": optim.matrix_lr}
    by_scale: dict[float, list[nn.Parameter]] = {}
    kind_of = _kinds(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            rate = given.get(kind_of(parameter))
            scale = 1.0 if rate is None else rate / _base(optim)
            by_scale.setdefault(scale, []).append(parameter)
    return [{"params": parameters, SCALE: scale} for scale, parameters in by_scale.items()]


def _base(optim: OptimConfig) -> float:
    assert optim.lr, "a rule asks for optim.lr above 0 beside rates by kind"
    return optim.lr


def _kinds(model: PreTrainedModel) -> Callable[[nn.Parameter], str]:
    """What a parameter is: `embedding` (also of a tied output layer), `unembedding`, `matrix` or, a vector, `other`."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding, unembedding = getattr(first, "weight", None), getattr(last, "weight", None)

    def kind_of(parameter: nn.Parameter) -> str:
        if parameter is embedding:
            return "embedding"
        if parameter is unembedding:
            return "unembedding"
        return "matrix" if parameter.dim() >= 2 else "other"

    return kind_of


def clip_gradient(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Scales the gradient down to `max_norm` (0: never) and returns its 2-norm from before; a collective if sharded.

    A norm that is not finite is returned and nothing is scaled.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    value = float(norm)
    if max_norm > 0 and math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return value


def names_with_bad_gradient(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Parameters whose gradient (this rank's shard of it) holds a NaN or an infinity."""
    return [n for n, p in named_parameters if p.grad is not None and not bool(_local(p.grad).isfinite().all())]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
