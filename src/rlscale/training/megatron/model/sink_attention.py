"""Core attention with sinks and sliding windows, in torch, on a GPU too.

Transformer Engine is not used here: with a learnable sink it has no kernel for packed samples. Its
`get_attention_backend` disables every one of them for `softmax_type != "vanilla" and qkv_format == "thd"`.

Shape legend as in `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlscale.training.attention.packed import PackedLayout
from rlscale.training.attention.sinks import attend_with_sinks
from rlscale.training.megatron.model.attention import TorchAttention, packed_layout
from rlscale.training.megatron.model.head_exchange import find_exchange
from rlscale.training.megatron.model.layers import mark_divided


class SinkAttention(TorchAttention):
    """`TorchAttention` with one sink for each query head of this rank, and with sliding windows.

    The sinks are the parameter `softmax_offset`, as in Megatron-core's `DotProductAttention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, layer_number, pg_collection=pg_collection, **options)
        assert pg_collection is not None, "Megatron-core passes the process groups to attention layers"
        self.group = pg_collection.tp
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Megatron-core counts the tokens before a query, transformers the query too.
        self.window = config.window_size[0] + 1 if has_window else None
        num_ranks = self.group.size()
        device, dtype = torch.cuda.current_device(), config.params_dtype
        self.softmax_offset = nn.Parameter(
            torch.zeros(config.num_attention_heads // num_ranks, device=device, dtype=dtype)
        )
        mark_divided(self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """As `TorchAttention.forward`: [T, H, D] -> [T, H * D], or rows [L, B, H, D] -> [L, B, H * D]."""
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if self.context is not None:
            return self._attend_exchanged(query, key, value, params=packed_seq_params if is_packed else None)
        if packed_seq_params is None or not is_packed:
            return self._attend_rows(query, key, value, sinks_H=self.softmax_offset)
        layout = packed_layout(packed_seq_params, device=query.device)
        return self._attend_packed(query, key, value, layout=layout, sinks_H=self.softmax_offset)

    def _attend_exchanged(self, *qkv: Tensor, params: PackedSeqParams | None) -> Tensor:
        """Attention of all tokens to this rank's share of the heads."""
        assert self.context is not None, "called with context parallelism only"
        num_rows, width, device = len(qkv[0]), qkv[0].shape[-1], qkv[0].device
        exchange = find_exchange(params, num_rows=num_rows, context=self.context, device=device)
        rows = (x.flatten(-2) if params is None else x.flatten(1).unsqueeze(1) for x in qkv)  # [L, B, P]
        q, k, v = (torch.unflatten(each, -1, (-1, width)) for each in exchange.to_heads(tuple(rows)))
        sinks_H = exchange.own_share(self.softmax_offset)
        if exchange.layout is None:
            return exchange.to_tokens(self._attend_rows(q, k, v, sinks_H=sinks_H))
        q, k, v = (each.squeeze(1) for each in (q, k, v))
        out = self._attend_packed(q, k, v, layout=exchange.layout, sinks_H=sinks_H)
        return exchange.to_tokens(out.unsqueeze(1)).squeeze(1)

    def _attend_rows(self, *qkv: Tensor, sinks_H: Tensor) -> Tensor:
        out = self._attend(*(x.permute(1, 2, 0, 3) for x in qkv), sinks_H=sinks_H)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_packed(self, *qkv: Tensor, layout: PackedLayout, sinks_H: Tensor) -> Tensor:
        parts = [
            bucket.unpad(self._attend(*(bucket.pad(x) for x in qkv), sinks_H=sinks_H)) for bucket in layout.buckets
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, sinks_H: Tensor) -> Tensor:
        return attend_with_sinks(query, key, value, sinks_H=sinks_H, scale=self.scale, window=self.window)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks for a checkpoint, divided over the tensor-parallel ranks along axis 0."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return state
