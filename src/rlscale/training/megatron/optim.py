"""Megatron-core's gradient buffers and optimiser, and one optimiser step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, ParamKey, ParamPredicate, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from rlscale.config import MegatronConfig, OptimConfig, OptimizerName
from rlscale.training.megatron.hf_mapping.mapping import MappedWeight, head_sizes
from rlscale.training.megatron.matrix_optimizer import MatrixLayout, make_matrix_parts, only_trained
from rlscale.training.megatron.model.field_values import field_values
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.megatron.model_parameters import mapped_parameters, parameter_kinds
from rlscale.training.optim.optimizer import SCALE, lr_scales
from rlscale.training.optim.step_checks import StepSettings, check_gradient


def wrap_chunks(model: MegatronModel, *, is_sharded: bool) -> list[DistributedDataParallel]:
    """Wraps the chunks of a model with buffers for float32 gradients, which are summed over data-parallel ranks.

    The loss of a micro-batch is its share of the loss of the step, so gradients are summed and never averaged.
    Megatron-core sums them in its per-token mode, in which it divides by a number of tokens; it gets none.

    Args:
        model: with its frozen parameters marked: they get no buffer.
        is_sharded: the ranks divide the state of the optimiser, see `shards_state`.
    """
    config = model.config
    config.calculate_per_token_loss = True
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded)
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


def shards_state(megatron: MegatronConfig, optim: OptimConfig) -> bool:
    """Whether data-parallel ranks divide the optimiser's state. It cuts matrices anywhere; Muon needs them whole."""
    return megatron.use_distributed_optimizer and optim.name != OptimizerName.muon


def make_optimizer(
    chunks: Sequence[DistributedDataParallel],
    *,
    model: MegatronModel,
    optim: OptimConfig,
    megatron: MegatronConfig,
    is_bf16: bool,
) -> Any:
    """The optimiser of `optim.name` over all trained parameters, with float32 master weights.

    Weight decay applies to each parameter, norms included. Kinds of parameters with a separate learning rate are
    separate groups. Returns Megatron-core's ChainedOptimizer: parts for dense parameters and for those of experts, and
    with Muon each of them again for the matrices.
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
            "use_distributed_optimizer": shards_state(megatron, optim),
        }
        | field_values(CoreOptimizerConfig, megatron.core_args)
    )
    kinds = parameter_kinds(model)
    overrides = _rate_overrides(kinds, lr_scales(optim))
    parts, others = [], {p for p in kinds if p.requires_grad}
    if optim.name == OptimizerName.muon:
        mapped: dict[Tensor, MappedWeight] = {p: each for _, p, each in mapped_parameters(model) if each is not None}
        layouts = {p: MatrixLayout.from_mapped(mapped[p]) for p in others if kinds[p] == "matrix"}
        sizes = head_sizes(model.architecture)
        parts = make_matrix_parts(chunks, optim=optim, config=config, overrides=overrides, layouts=layouts, sizes=sizes)
        others -= layouts.keys()
    with only_trained(chunks, others):
        adam = get_megatron_optimizer(config, list(chunks), config_overrides=overrides, use_gloo_process_groups=False)
    # A part without parameters on any rank has no optimiser, which Megatron-core's checkpoints do not expect.
    return ChainedOptimizer([*parts, *(part for part in adam.chained_optimizers if part.optimizer is not None)])


def _rate_overrides(kinds: Mapping[Tensor, str], scales: Mapping[str, float]) -> dict[ParamKey, Any]:
    """Settings of the parameter groups with a separate learning rate, as Megatron-core takes them.

    Never None, for which Megatron-core excludes vectors from weight decay.
    """

    def key(kind: str) -> ParamKey:
        return ParamKey(predicate=ParamPredicate(name=kind, fn=lambda parameter: kinds[parameter] == kind))

    return {key(kind): {SCALE: scale} for kind, scale in scales.items()}


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
        group["lr"] = settings.lr * group.get(SCALE, 1.0)
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
    with_grad = ((name, p) for name, p in named_parameters if p.requires_grad)
    return [name for name, p in with_grad if not bool(getattr(p, "main_grad").isfinite().all())]  # noqa: B009
