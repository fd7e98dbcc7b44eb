"""Exchange between context-parallel ranks: all tokens of some heads for some tokens of all heads (arXiv:2309.14509).

    rank 0   chunks 0 and 3 of each sample, all heads ─┐             ┌─ all tokens, heads 0 to H/2
                                                       ├─ all to all ┤
    rank 1   chunks 1 and 2 ───────────────────────────┘             └─ all tokens, heads H/2 to H

For layers that need all tokens of a sample at once: linear attention, and attention with sinks.

Shape legend: L positions of this rank, n ranks, N = n L positions of all ranks in the order of the samples, B rows (1
if samples are packed), P width of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from rlscale.training.attention.packed import PackedLayout
from rlscale.training.megatron.model.attention import build_packed_layout, gathered_rows
from rlscale.training.packing.context_parallel import ContextGroup
from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadExchange:
    """The exchange of one micro-batch; both directions are collectives of the context-parallel ranks."""

    context: ContextGroup
    layout: PackedLayout | None  # of whole packed samples; None: rows of equal length
    order: Tensor  # [N] for each position of the samples its index among those of the ranks, one rank after another
    inverse: Tensor  # [N]

    @classmethod
    def from_lengths(
        cls, lengths_S: Int64, *, context: ContextGroup, is_packed: bool, device: torch.device
    ) -> HeadExchange:
        """The exchange of samples with these tokens on all ranks together."""
        order = np.concatenate(gathered_rows(lengths_S, size=context.size))
        layout = build_packed_layout(lengths_S, device=device) if is_packed else None
        both = (torch.from_numpy(each).to(device) for each in (order, np.argsort(order)))
        return cls(context=context, layout=layout, **dict(zip(("order", "inverse"), both, strict=True)))

    def to_heads(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All positions of this rank's share of the heads: each [L, B, P] -> [N, B, P / n].

        Args:
            parts: whose last axis has equal shares of the heads of every rank, one after another.
        """
        size = self.context.size
        shares = torch.cat([torch.unflatten(part, -1, (size, -1)) for part in parts], dim=-1)  # [L, B, n, widths]
        received = all_to_all(self.context.group, shares.movedim(2, 0).contiguous())
        widths = [part.shape[-1] // size for part in parts]
        return torch.split(received.flatten(0, 1).index_select(0, self.order), widths, dim=-1)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """All heads of this rank's positions, the inverse: [N, B, P / n] -> [L, B, P]."""
        by_rank = torch.unflatten(heads.index_select(0, self.inverse), 0, (self.context.size, -1))
        # The heads of each rank at these positions.
        received: Tensor = all_to_all(self.context.group, by_rank.contiguous())
        return received.movedim(0, 2).flatten(2)

    def own_share(self, parameter: Tensor) -> Tensor:
        """The part of a parameter, along axis 0, that belongs to this rank's heads."""
        return parameter.chunk(self.context.size)[self.context.index]


def find_exchange(
    params: PackedSeqParams | None, *, num_rows: int, context: ContextGroup, device: torch.device
) -> HeadExchange:
    """The exchange of a micro-batch, which all layers share.

    Args:
        params: of packed samples. None: rows of equal length.
        num_rows: positions of a row on this rank.
        context: the ranks that share each sample.
        device: of the model.
    """
    if params is None:
        lengths = np.array([num_rows * context.size], dtype=np.int64)
        return HeadExchange.from_lengths(lengths, context=context, is_packed=False, device=device)
    found = getattr(params, "exchange", None)
    if not isinstance(found, HeadExchange):
        padded = params.cu_seqlens_q_padded
        offsets = params.cu_seqlens_q if padded is None else padded
        lengths = np.diff(offsets.cpu().numpy()).astype(np.int64)
        found = HeadExchange.from_lengths(lengths, context=context, is_packed=True, device=device)
        params.exchange = found
    return found
