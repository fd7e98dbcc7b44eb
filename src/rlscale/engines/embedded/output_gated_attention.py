"""Grouped-query attention whose output has a gate, as between gated delta nets (Qwen3-Next).

Shape legend: N rows of a pass, H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlscale.engines.embedded.attention import CachedAttention, DecodePass, Heads, PromptPass
from rlscale.engines.embedded.hidden_norm import HiddenNorm
from rlscale.engines.embedded.row_adapters import Projection
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.decoder_ops import rotate_first


class OutputGatedAttention(CachedAttention):
    """Attention whose output is multiplied by the sigmoid of gates, which are projected with the queries.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.3.self_attn.`.
        config: of the model.
        index: of the layer among those with keys and values.
    """

    def __init__(self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> None:
        super().__init__(config, index=index)
        self.qkv = loader.linear([f"{prefix}{part}_proj" for part in "qkv"])  # to (2H + 2K) D
        self._query_norm, self._key_norm = (
            HiddenNorm(loader.load(f"{prefix}{part}_norm.weight"), eps=config.norm_eps, is_zero_centered=True)
            for part in "qk"
        )
        self.output = loader.linear([f"{prefix}o_proj"])

    def projections(self) -> Iterator[Projection]:
        """See `Attention`."""
        yield from (self.qkv, self.output)

    def _project(self, x: Tensor, inputs: PromptPass | DecodePass) -> Heads:
        a, config = self._config.architecture, self._config
        heads = self.qkv(x, inputs.adapters).view(len(x), -1, a.head_dim)
        q, k, v = torch.split(heads, [2 * a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        # A query head and its gate are neighbours.
        q, gate = q[:, ::2], q[:, 1::2]
        q = rotate_first(self._query_norm(q), config, inputs.cos, inputs.sin)
        k = rotate_first(self._key_norm(k), config, inputs.cos, inputs.sin)
        return Heads(q, k, v, gate.flatten(1))
