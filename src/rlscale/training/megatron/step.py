"""Forward and backward passes over the micro-batches of a step, through all pipeline stages.

Shape legend: R trainable tokens of a micro-batch, T positions of this rank, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.model.model_inputs import MegatronMicrobatch
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.metrics import MetricSums
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, write_microbatch

StageFunction = Callable[[Microbatch, Tensor, MegatronDecoder], Tensor]
"""Called on the last stage with a micro-batch, its hidden states [1, T, H] and the last chunk.

For training it returns the micro-batch's share of the loss of the step, else one number per trainable token [R].
"""


def forward_backward(
    chunks: Sequence[nn.Module], micros: Sequence[Microbatch], *, loss: StageFunction, forward_only: bool = False
) -> None:
    """Runs all micro-batches and, unless `forward_only`, accumulates and reduces their gradients; a collective.

    Args:
        chunks: of the model on this rank.
        micros: the same number on every rank, at least one.
        loss: called on the last stage; its results add up to the loss of the step, over micro-batches and
            data-parallel ranks.
        forward_only: no gradient; the results of `loss` are ignored.
    """
    assert micros, "a step needs at least one micro-batch on every rank"
    # Gradients are summed, see `wrap_chunks`: so each rank counts its part of a mean over all micro-batches.
    part = 1.0 / (len(micros) * parallel_state.get_data_parallel_world_size())
    get_model_config(chunks[0]).grad_scale_func = partial(_scale_expert_losses, factor=part)
    with torch.no_grad() if forward_only else nullcontext():
        get_forward_backward_func()(
            forward_step_func=_ForwardStep(loss),
            data_iterator=[iter(micros) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(micros),
            # Over all context-parallel ranks; ignored with variable lengths.
            seq_length=micros[0].input_ids.shape[1] * micros[0].num_shards,
            micro_batch_size=micros[0].input_ids.shape[0],
            forward_only=forward_only,
        )


def _scale_expert_losses(value: Tensor, *, factor: float) -> Tensor:
    """Scales the losses that balance experts, for which Megatron-core passes a one, and not the loss of the step."""
    return value if value.requires_grad else value * factor


class _ForwardStep:
    """Forward pass of one micro-batch through one chunk, with the signature of Megatron-core's schedules."""

    def __init__(self, loss: StageFunction) -> None:
        self._loss = loss

    def __call__(
        self, data: Iterator[Microbatch], chunk: nn.Module, is_recomputed: bool | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Schedules pass `is_recomputed` with `megatron.num_microbatches_with_partial_activation_checkpoints` only."""
        micro = next(data)
        assert isinstance(micro, MegatronMicrobatch), "packed for Megatron-core"
        with _activations_kept(chunk) if is_recomputed is False else nullcontext():
            output = chunk(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.params)
        return output, partial(self._compute_loss, decoder=unwrap_model(chunk), micro=micro)

    def _compute_loss(
        self, hidden: Tensor, *, decoder: MegatronDecoder, micro: Microbatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # Zero tokens: the share belongs to the whole step already, and Megatron-core must not divide it.
        num_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
        return self._loss(micro, hidden, decoder), num_tokens, {}


@contextmanager
def _activations_kept(chunk: nn.Module) -> Iterator[None]:
    """Context in which a forward pass keeps the activations of its layers although the model recomputes them."""
    config = get_model_config(chunk)
    granularity, config.recompute_granularity = config.recompute_granularity, None
    try:
        yield
    finally:
        config.recompute_granularity = granularity


def score_column(
    chunks: Sequence[nn.Module],
    micros: Sequence[Microbatch],
    *,
    dims: ParallelDims,
    entries: StageFunction,
    num_tokens: int,
) -> Tensor:
    """One number per trainable token as a column of the batch, 0 elsewhere and outside of `micros`; a collective.

    On the CPU, float32, on every stage. [num_tokens]
    """
    column = torch.zeros(num_tokens)
    forward_backward(chunks, micros, loss=partial(_store_entries, entries=entries, column=column), forward_only=True)
    if dims.num_stages > 1:
        on_device = column.to(micros[0].input_ids.device)
        dist.broadcast(on_device, src=dims.last_stage_rank, group=dims.stage_group)
        column = on_device.cpu()
    return column


def score_logprobs(
    model: MegatronModel,
    rollout: PackedRollout,
    *,
    dims: ParallelDims,
    head: OutputHead,
    entropies: MetricSums | None = None,
) -> Tensor:
    """Logprobs of a model as a column of the batch, on every stage; a collective. [num_tokens]

    `entropies` gets `rollout/entropy` on the last stage; None: no entropy is added.
    """
    entries = partial(_logprob_entries, head=head, entropies=entropies)
    return score_column(model.chunks, rollout.scoring_micros, dims=dims, entries=entries, num_tokens=rollout.num_tokens)


def _store_entries(
    micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder, *, entries: StageFunction, column: Tensor
) -> Tensor:
    """Computes the entries of a micro-batch and writes them into a column; returns a number for the schedule."""
    computed = entries(micro, hidden, decoder)
    write_microbatch(column, micro, computed.float().cpu())
    return computed.sum()


def _logprob_entries(
    micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder, *, head: OutputHead, entropies: MetricSums | None
) -> Tensor:
    logprobs, entropy = head.logprobs_and_entropy(hidden, decoder.head_weight, micro=micro, entropy_grad=False)
    if entropies is not None:
        entropies.add({"rollout/entropy": micro.layout.sum_and_count(entropy)})
    return logprobs
