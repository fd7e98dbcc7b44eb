"""Megatron-core's gradient buffers and optimiser, and one optimiser step."""

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
    """Wraps the chunks of a model with buffers for float32 gradients, which are summed over data-parallel ranks.

    The loss of a micro-batch is its share of the loss of the step, so gradients are summed and never averaged.
    Megatron-core sums them in its per-token mode, in which it divides by a number of tokens; it gets none.
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
        _include_padding(buffer)
    # Schedules expect one function for a single chunk and a list for several.
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    config.finalize_model_grads_func = _finalize
    return chunks


def make_optimizer(
    chunks: Sequence[DistributedDataParallel], *, optim: OptimConfig, megatron: MegatronConfig, is_bf16: bool
) -> Any:
    """AdamW over all parameters, with float32 master weights. Weight decay applies to each parameter, norms included.

    Returns Megatron-core's ChainedOptimizer: one part for dense parameters and one for those of experts.
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
    # Empty overrides: by default Megatron-core excludes vectors from weight decay.
    return get_megatron_optimizer(config, list(chunks), config_overrides={}, use_gloo_process_groups=False)


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
    """Clears all gradients before the first micro-batch of a step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def optim_step(
    optimizer: Any, *, settings: StepSettings, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> float:
    """Clips the accumulated gradients and makes one optimiser step; a collective. Returns the norm before clipping.

    Args:
        optimizer: of `make_optimizer`.
        settings: number, rate and clipping.
        named_parameters: of this rank, for the error message.

    Raises:
        WorkerError: the norm is not finite. Raised on every rank, before any weight is changed.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    check_gradient(norm, step=settings.number, bad_names=lambda: _bad_names(named_parameters), role=settings.role)
    if settings.max_grad_norm > 0:
        # Clip each part by the norm over all parts.
        for part in optimizer.chained_optimizers:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=settings.max_grad_norm, total_norm=norm)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
    is_done = optimizer.step_with_ready_grads()
    assert is_done, "without loss scaling no step is skipped"
    optimizer.zero_grad()  # else master weights would keep their gradients allocated
    return norm


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """The buffers in which gradients are accumulated; their content is not needed between steps."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_tensors(optimizer: Any, *, exclude: Iterable[Tensor]) -> Iterator[Tensor]:
    """Master weights and moments, without those that share memory with the tensors of `exclude`."""
    excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
    for part in optimizer.chained_optimizers:
        states = (value for state in part.optimizer.state.values() for value in state.values())
        for tensor in (*(p for group in part.param_groups for p in group["params"]), *states):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in excluded:
                yield tensor


def _include_padding(buffer: Any) -> None:
    """Makes checkpoints of the optimiser include the padding of its buckets.

    Megatron-core 0.16 leaves the padding out of the tensor that it saves, but cuts the states of the parameters from it
    at positions that count the padding. A tied embedding has its own bucket on the first and last of several stages; if
    its size is no multiple of 128, the states after it are saved shifted.
    """
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()
    buffer.numel_unpadded = buffer.numel


def _finalize(chunks: list[nn.Module], num_tokens: object = None, **options: Any) -> None:
    """Reduces gradients over data-parallel ranks, and those of weights that tensor or pipeline ranks share."""
    # No number of tokens: the gradients are not divided.
    finalize_model_grads(chunks, None, **options)


def _bad_names(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Parameters whose gradient on this rank contains a NaN or an infinity."""
    return [name for name, p in named_parameters if not bool(getattr(p, "main_grad").isfinite().all())]  # noqa: B009
