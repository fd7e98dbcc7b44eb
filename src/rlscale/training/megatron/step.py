"""Forward and backward passes over the micro-batches of a step, through all stages of the pipeline.

Shape legend: R trainable tokens of a micro-batch, T places of this rank, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rlscale.training.megatron.model.megatron_model import MegatronDecoder
from rlscale.training.megatron.model.model_inputs import MegatronMicrobatch
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.packing.microbatch import Microbatch

StageLoss = Callable[[Microbatch, Tensor, MegatronDecoder], Tensor]
"""From a micro-batch, its hidden states [1, T, H] and the last chunk to its share of the step's loss."""

Entries = Callable[[Microbatch, Tensor, MegatronDecoder], Tensor]
"""Likewise to one number for each of its trainable tokens. [R]"""


def run_microbatches(
    chunks: Sequence[nn.Module], micros: Sequence[Microbatch], *, loss_of: StageLoss, forward_only: bool = False
) -> None:
    """Runs all micro-batches, and unless `forward_only` adds up and reduces their gradients; a collective.

    Args:
        chunks: of the model on this rank.
        micros: as many on every rank, at least one.
        loss_of: called on the last stage; its results add up to the loss of the step, over micro-batches and
            data-parallel ranks.
        forward_only: no gradient; what `loss_of` gives is not used.
    """
    assert micros, "a step needs at least one micro-batch on every rank"

    def forward_step(data: Iterator[Microbatch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro = next(data)
        assert isinstance(micro, MegatronMicrobatch), "packed for Megatron-core"
        output = chunk(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.params)
        return output, partial(loss, decoder=unwrap_model(chunk), micro=micro)

    def loss(
        hidden: Tensor, *, decoder: MegatronDecoder, micro: Microbatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # The share is one of the whole step already: no number of tokens divides it.
        no_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
        return loss_of(micro, hidden, decoder), no_tokens, {}

    num_shares = micros[0].num_shards
    with torch.no_grad() if forward_only else nullcontext():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micros) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(micros),
            seq_length=micros[0].input_ids.shape[1] * num_shares,  # of no meaning where lengths vary
            micro_batch_size=micros[0].input_ids.shape[0],
            forward_only=forward_only,
        )


def score(
    chunks: Sequence[nn.Module],
    micros: Sequence[Microbatch],
    *,
    dims: ParallelDims,
    entries_of: Entries,
    num_tokens: int,
) -> Tensor:
    """What a model says of each trainable token as a column of the batch, 0 elsewhere and outside `micros`.

    On the CPU, float32, on every stage; a collective. [num_tokens]
    """
    column = torch.zeros(num_tokens)

    def keep(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
        entries = entries_of(micro, hidden, decoder)
        trainable = micro.layout.mask_T.cpu()
        column[torch.from_numpy(micro.batch_rows)[trainable]] = entries.float().cpu()[trainable]
        return entries.sum()

    run_microbatches(chunks, micros, loss_of=keep, forward_only=True)
    if dims.num_stages > 1:
        on_device = column.to(micros[0].input_ids.device)
        dist.broadcast(on_device, src=dims.last_stage_rank, group=dims.stage_group)
        column = on_device.cpu()
    return column
