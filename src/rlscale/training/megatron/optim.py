"""Megatron-core's optimiser, and one step of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from rlscale.config import MegatronConfig, OptimConfig
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.optim.step_checks import StepSettings, check_gradient

_FIELDS = frozenset(field.name for field in fields(CoreOptimizerConfig))


def wrap_chunks(model: MegatronModel, *, megatron: MegatronConfig) -> list[DistributedDataParallel]:
    """The chunks of a model with buffers for float32 gradients, which are added up over the data-parallel ranks.

    The loss of a micro-batch is a share of that of the step, so gradients are added and never averaged: Megatron-core
    does so where it counts tokens itself, of which it is told none.
    """
    config = model.config
    config.calculate_per_token_loss = True
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=megatron.use_distributed_optimizer
    )
    chunks = [
        DistributedDataParallel(config=config, ddp_config=wrapping, module=chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model.chunks)
    ]
    for buffer in (each for chunk in chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        _count_padding(buffer)
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    config.finalize_model_grads_func = _finalize
    return chunks


def make_optimizer(
    chunks: Sequence[DistributedDataParallel], *, optim: OptimConfig, megatron: MegatronConfig, is_bf16: bool
) -> Any:
    """AdamW over all parameters, with float32 master weights. Weight decay applies to each parameter, norms included.

    Returns Megatron-core's ChainedOptimizer: of dense parameters, and of those of experts.
    """
    config = CoreOptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": optim.lr,  # set again before every step
            "weight_decay": optim.weight_decay,
            "adam_beta1": optim.adam_beta1,
            "adam_beta2": optim.adam_beta2,
            "adam_eps": optim.adam_eps,
            "clip_grad": optim.clip_grad,
            "bf16": is_bf16,
            "params_dtype": torch.bfloat16 if is_bf16 else torch.float32,
            "use_distributed_optimizer": megatron.use_distributed_optimizer,
        }
        | {name: value for name, value in megatron.core_args.items() if name in _FIELDS}
    )
    # No entry: Megatron-core would leave vectors without weight decay.
    return get_megatron_optimizer(config, list(chunks), config_overrides={}, use_gloo_process_groups=False)


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
    """Before the first micro-batch of a step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def apply_gradients(
    optimizer: Any, *, settings: StepSettings, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> float:
    """Clips the gradients that the schedule left behind and steps; returns their norm from before. A collective.

    Args:
        optimizer: of `make_optimizer`.
        settings: number, rate and clipping.
        named_parameters: of this rank, for the message.

    Raises:
        WorkerError: the norm is not finite. Raised on every rank, before any weight is changed.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    check_gradient(norm, step=settings.number, bad_names=lambda: _bad_names(named_parameters), role=settings.role)
    if settings.max_grad_norm > 0:
        for each in optimizer.chained_optimizers:
            if parameters := each.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=settings.max_grad_norm, total_norm=norm)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
    is_done = optimizer.step_with_ready_grads()
    assert is_done, "without a scale of the loss no step is left out"
    optimizer.zero_grad()  # master weights would hold on to theirs
    return norm


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """What gradients are added up in; of no worth between steps."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_tensors(optimizer: Any, *, but: Iterable[Tensor]) -> Iterator[Tensor]:
    """Master weights and moments; without those that lie in the memory of the tensors `but`."""
    others = {tensor.untyped_storage()._cdata for tensor in but}
    for each in optimizer.chained_optimizers:
        states = (value for state in each.optimizer.state.values() for value in state.values())
        for tensor in (*(p for group in each.param_groups for p in group["params"]), *states):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in others:
                yield tensor


def _count_padding(buffer: Any) -> None:
    """Has checkpoints of the optimiser keep what fills up its buckets.

    Else Megatron-core 0.16 leaves it out of the tensor that it cuts the parameters' states from by places that count
    it: those behind a tied embedding, which has a bucket of its own on the first and last of several stages, are saved
    shifted where its size is no multiple of 128.
    """
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()
    buffer.numel_unpadded = buffer.numel


def _finalize(chunks: list[nn.Module], num_tokens: object = None, **options: Any) -> None:
    """Adds up gradients over data-parallel ranks, and what tensor- and pipeline-parallel ranks share."""
    finalize_model_grads(chunks, None, **options)


def _bad_names(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Parameters whose gradient on this rank holds a NaN or an infinity."""
    return [name for name, p in named_parameters if not bool(getattr(p, "main_grad").isfinite().all())]  # noqa: B009
