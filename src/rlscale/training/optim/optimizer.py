"""Optimiser of a model, its state, and the clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.config import OptimConfig, OptimizerName
from rlscale.training.optim.cpu_adam import HostAdamW, host_state
from rlscale.training.optim.muon import MUON, TRANSPOSED, MuonAdamW, local_shard, muon_state

SCALE = "lr_scale"
"""Key of a parameter group: its learning rate as a multiple of `optim.lr`."""


def make_optimizer(model: PreTrainedModel, *, optim: OptimConfig) -> torch.optim.Optimizer:
    """Builds the optimiser of `optim.name` over all trainable parameters. Weight decay applies to all, norms included.

    Where `optim` has a learning rate for embedding, output layer or matrices, each kind is a separate group. AdamW is
    torch's fused kernel, also for vectors and tables next to Muon.
    """
    adam: dict[str, Any] = {
        "lr": 0.0,  # set before every step
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "weight_decay": optim.weight_decay,
        "fused": True,
    }
    groups = _groups(model, optim)
    if optim.name == OptimizerName.muon:
        for group in groups:
            group["weight_decay"] = optim.weight_decay
        return MuonAdamW(groups, momentum=optim.muon_momentum, adam=adam)
    return (HostAdamW if optim.name == OptimizerName.deepspeed_cpu_adam else torch.optim.AdamW)(groups, **adam)


def fill_state(optimizer: torch.optim.Optimizer, *, num_steps: int) -> None:
    """Gives every parameter the state after `num_steps` steps with moments of 0, into which a checkpoint is loaded.

    With 0 steps there is no state, as before the first step.
    """
    optimizer.state.clear()
    for group in optimizer.param_groups if num_steps else ():
        for parameter in group["params"]:
            if group.get(MUON):
                state = muon_state(parameter)
            elif isinstance(optimizer, HostAdamW):
                state = host_state(parameter, num_steps=num_steps)
            else:
                # One tensor per parameter, on its device: the fused kernel increments it in place.
                step = torch.tensor(float(num_steps), device=parameter.device)
                state = {"step": step, **{moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}}
            optimizer.state[parameter] = state


def optimizer_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Moments of a parameter, each as large as the parameter, by name; empty before the first step.

    The step count is excluded: it is the same for all parameters.
    """
    # Not by indexing: `state` is a defaultdict, which would add an entry.
    return {name: value for name, value in optimizer.state.get(parameter, {}).items() if name != "step"}


def set_lr(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Sets the learning rate of the next step, scaled for each parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[SCALE]


def lr_scales(optim: OptimConfig) -> dict[str, float]:
    """Learning rate of each kind of parameter that has a separate one, as a multiple of `optim.lr`."""
    given = {"embedding": optim.embedding_lr, "unembedding": optim.unembedding_lr, "matrix": optim.matrix_lr}
    # A tied table gets the smaller of both rates: a rate that is right for an embedding can ruin an output layer.
    given["tied"] = min((rate for rate in (optim.embedding_lr, optim.unembedding_lr) if rate is not None), default=None)
    return {kind: rate / _base(optim) for kind, rate in given.items() if rate is not None}


def _groups(model: PreTrainedModel, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trainable parameters grouped by learning rate, and for Muon by algorithm, in the order of the model."""
    scales, by_rate = lr_scales(optim), dict[tuple[float, bool, bool], list[nn.Parameter]]()
    kind_of, transposed = _kinds(model), _transposed(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = kind_of(parameter)
            is_muon = optim.name == OptimizerName.muon and kind == "matrix"
            group = scales.get(kind, 1.0), is_muon, is_muon and parameter in transposed
            by_rate.setdefault(group, []).append(parameter)
    return [
        {"params": found, SCALE: scale, MUON: by_muon, **({TRANSPOSED: True} if is_transposed else {})}
        for (scale, by_muon, is_transposed), found in by_rate.items()
    ]


def _base(optim: OptimConfig) -> float:
    assert optim.lr, "a config rule requires optim.lr above 0 with rates by kind"
    return optim.lr


def _kinds(model: PreTrainedModel) -> Callable[[nn.Parameter], str]:
    """Function from a parameter to `embedding`, `unembedding`, `tied` (both), `matrix`, or `other` for vectors."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding, unembedding = getattr(first, "weight", None), getattr(last, "weight", None)
    # Stacked biases of experts, and kernels of one number for each position and channel, are no matrices.
    vectors: set[Tensor] = {p for name, p in model.named_parameters() if name.endswith("bias")}
    vectors |= {module.weight for module in model.modules() if isinstance(module, nn.Conv1d)}

    def kind_of(parameter: nn.Parameter) -> str:
        if parameter is embedding:
            return "tied" if embedding is unembedding else "embedding"
        if parameter is unembedding:
            return "unembedding"
        return "matrix" if parameter.dim() >= 2 and parameter not in vectors else "other"

    return kind_of


def _transposed(model: PreTrainedModel) -> set[nn.Parameter]:
    """Stacks of experts [E, in, out], as of gpt-oss."""
    stacks = (module for module in model.modules() if getattr(module, "is_transposed", False))
    return {p for module in stacks for p in module.parameters(recurse=False) if p.dim() == 3}


def clip_gradient(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Clips the gradient to `max_norm` (0: never) and returns the 2-norm before; a collective of all ranks if sharded.

    A norm that is not finite is returned without clipping.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    value = float(norm)
    if max_norm > 0 and math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return value


def names_with_bad_gradient(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of parameters whose gradient, in this rank's shard, has a NaN or an infinity."""
    return [n for n, p in named_parameters if p.grad is not None and not bool(local_shard(p.grad).isfinite().all())]
