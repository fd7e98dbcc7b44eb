"""Gated delta nets and gated attention of Megatron-core, for packed samples.

    hidden ─ norm, in_proj ─┬─ queries, keys, values ─ convolution ─┬─ delta rule ─ norm ─ * ─ out_proj
                            ├─ decays, betas ───────────────────────┘                      │
                            └─ output gate ────────────────────────────────────────────────┘

Tensor-parallel ranks divide the heads. State and convolution of a sample begin empty.

Shape legend: L positions of a row, B rows (1 if samples are packed), H value heads of this rank, D key width, V value
width, C channels of queries, keys and values on this rank, T = L where B = 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlscale.models.delta_rule import causal_convolution, gated_delta_rule, log_decays
from rlscale.training.attention.packed import PackedLayout
from rlscale.training.megatron.model.attention import packed_layout
from rlscale.training.megatron.model.head_exchange import find_exchange
from rlscale.training.megatron.model.layers import rms_norm
from rlscale.training.packing.context_parallel import ContextGroup


class HeadNorm(nn.Module):
    """RMS norm of each value head, the same in every head. Its gradient is summed over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight, self.eps = nn.Parameter(ones), eps

    def forward(self, x: Tensor) -> Tensor:
        # Each rank has the gradient of its heads. Megatron-core sums those of norms of queries and keys only.
        weight = copy_to_tensor_model_parallel_region(self.weight)
        return rms_norm(x, weight, self.eps, is_zero_centered=False)


class GatedDeltaNet(gated_delta_net.GatedDeltaNet):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's layer, with its parameters and their shards, for packed samples and without fla on a CPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # The original raises without fla, which its own forward pass calls; the one below needs it on CUDA only.
        gated_delta_net.HAVE_FLA = True
        super().__init__(*args, **options)
        group = self.pg_collection.cp
        size = group.size()
        self.context = ContextGroup(index=group.rank(), size=size, group=group) if size > 1 else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The output of the layer, and no bias: [L, B, hidden] -> [L, B, hidden].

        Args:
            hidden_states: [L, B, hidden]; with sequence parallelism the positions of this rank.
            attention_mask: ignored, as in `TorchAttention`.
            packed_seq_params: of packed samples. None: one sample per row, padding at its end.
            options: of attention, which this layer does not have.
        """
        projected, _ = self.in_proj(hidden_states)
        heads, keys, values = (each // self.tp_size for each in (self.num_value_heads, self.qk_dim, self.v_dim))
        parts = torch.split(projected, [keys, keys, values, values, heads, heads], dim=-1)
        # The kernel of each channel: queries, keys and values.
        taps = torch.split(self.conv1d.weight.squeeze(1), [keys, keys, values])
        log_rate, decay_bias = self.A_log, self.dt_bias
        exchange, layout = None, None
        if self.context is not None:
            device = projected.device
            exchange = find_exchange(packed_seq_params, num_rows=len(projected), context=self.context, device=device)
            parts, layout = exchange.to_heads(parts), exchange.layout
            taps = tuple(exchange.own_share(each) for each in taps)
            log_rate, decay_bias = exchange.own_share(log_rate), exchange.own_share(decay_bias)
        elif packed_seq_params is not None:
            layout = packed_layout(packed_seq_params, device=projected.device)
        gated = self._mix(parts, torch.cat(taps), log_rate=log_rate, decay_bias=decay_bias, layout=layout)
        output, bias = self.out_proj(gated if exchange is None else exchange.to_tokens(gated))
        return output, bias

    def _mix(
        self,
        parts: tuple[Tensor, ...],
        taps: Tensor,
        *,
        log_rate: Tensor,
        decay_bias: Tensor,
        layout: PackedLayout | None,
    ) -> Tensor:
        """The gated output of some heads for all positions. [L, B, H V]

        Args:
            parts: queries, keys, values, gates, betas and decays of these heads, [L, B, width] each.
            taps: of the convolution. [C, kernel]
            log_rate: of the decays. [H]
            decay_bias: of the decays. [H]
            layout: of packed samples; None: rows of equal length.
        """
        *qkv, gate, beta, decay = (part.transpose(0, 1) for part in parts)
        widths, rows = [part.shape[-1] for part in qkv], torch.cat(qkv, dim=-1)
        convolved = F.silu(causal_convolution(rows, taps, _positions(rows, layout))).to(rows.dtype)
        q, k, v = (
            torch.unflatten(x, -1, (-1, width))
            for x, width in zip(
                torch.split(convolved, widths, dim=-1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )
        # Neighbouring value heads share a key head.
        q, k = (x.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=2) for x in (q, k))
        log_decay = log_decays(decay, log_rate, decay_bias)
        out = _delta_rule(q, k, v, log_decay=log_decay, beta=beta.sigmoid(), layout=layout).to(rows.dtype)
        # In the order of transformers: the gate multiplies in float32.
        gated: Tensor = self.out_norm(out) * F.silu(torch.unflatten(gate, -1, (-1, self.value_head_dim)).float())
        return gated.to(rows.dtype).flatten(2).transpose(0, 1).contiguous()


class GatedAttention(SelfAttention):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's attention with output gates, also where tensor-parallel ranks share a key head."""

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Queries, keys, values and gates. [L, B, heads, width] each"""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        ranks_per_key = self.pg_collection.tp.size() // self.config.num_query_groups
        if ranks_per_key > 1:
            # Megatron-core 0.16 chooses this rank's queries of the shared key head, but not their gates.
            first = self.pg_collection.tp.rank() % ranks_per_key * query.shape[2]
            gate = gate[:, :, first : first + query.shape[2]]
        return query, key, value, gate


def _positions(rows: Tensor, layout: PackedLayout | None) -> Tensor:
    """The position of each entry of a row in its sample. [L]"""
    own = torch.arange(rows.shape[1], device=rows.device)
    if layout is None:
        return own
    starts, lengths = layout.cu_seqlens[:-1].long(), layout.cu_seqlens.diff()
    return own - starts.repeat_interleave(lengths, output_size=rows.shape[1])


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, layout: PackedLayout | None
) -> Tensor:
    """`gated_delta_rule` of rows [B, L, H, width] and [B, L, H], by the kernel of fla on CUDA. [B, L, H, V]"""
    if q.is_cuda:
        # Imported here: the package needs a GPU. A check before the start requires it there.
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        ends = None if layout is None else layout.cu_seqlens.long()
        out, _ = chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
        return out  # type: ignore[no-any-return]  # fla has no types
    parts = (q, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1))
    if layout is None:
        return _heads_first(*(x.transpose(1, 2) for x in parts)).transpose(1, 2)
    # Samples of similar length as rows of one tensor; padding follows the tokens, which do not see it.
    found = [bucket.unpad(_heads_first(*(bucket.pad(x[0]) for x in parts))) for bucket in layout.buckets]
    return torch.cat(found).unsqueeze(0)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    outputs, _ = gated_delta_rule(q, k, v, log_decay=log_decay.squeeze(-1), beta=beta.squeeze(-1))
    return outputs
