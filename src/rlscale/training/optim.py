"""The optimiser, and what is done to gradients before it steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlscale.config import OptimConfig, OptimizerName


def make_optimizer(parameters: Iterable[nn.Parameter], *, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters, fused. Weight decay applies to every one of them, norms included."""
    assert optim.name == OptimizerName.adam, f"the config refuses optim.name={optim.name}"
    return torch.optim.AdamW(
        [p for p in parameters if p.requires_grad],
        lr=0.0,  # set before every step
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Sets the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


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
