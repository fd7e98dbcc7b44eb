"""Multi-head latent attention (DeepSeek-V3, arXiv:2412.19437), expanded to the keys and values of every head.

    hidden - down - norm - up -> queries of all heads
           - down - norm - up -> keys without position, values
                  - rotated, one for all heads -> the rotary part of each key

The cache holds expanded keys and values. That takes more memory than latents, from which engines for large models
compute scores, but every step is that of other attention.

Shape legend: N rows of a pass, H heads, D width of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.engines.embedded.attention import CachedAttention, DecodePass, Heads, PromptPass
from rlscale.engines.embedded.hidden_norm import HiddenNorm
from rlscale.engines.embedded.row_adapters import Projection
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.decoder_ops import rotate

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents. transformers uses it whatever `rms_norm_eps` of the other norms is."""


class ExpandedLatentAttention(CachedAttention):
    """Latent attention, with compressed queries (`q_lora_rank`) or without.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.0.self_attn.`.
        config: of the model.
        index: of the layer among those with keys and values.
    """

    def __init__(self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> None:
        super().__init__(config, index=index)
        self._shape, is_compressed = config.architecture, config.architecture.q_rank > 0
        queries = "q_a_proj" if is_compressed else "q_proj"
        self._down = loader.linear([f"{prefix}{queries}", f"{prefix}kv_a_proj_with_mqa"])
        self._query_norm: HiddenNorm | None = None
        if is_compressed:
            self._query_norm = HiddenNorm(loader.load(f"{prefix}q_a_layernorm.weight"), eps=LATENT_EPS)
            self._query_up = loader.linear([f"{prefix}q_b_proj"])
        self._norm = HiddenNorm(loader.load(f"{prefix}kv_a_layernorm.weight"), eps=LATENT_EPS)
        self._up = loader.linear([f"{prefix}kv_b_proj"])
        self.output = loader.linear([f"{prefix}o_proj"])

    def projections(self) -> Iterator[Projection]:
        """See `Attention`."""
        yield self._down
        if self._query_norm is not None:
            yield self._query_up
        yield from (self._up, self.output)

    def _project(self, x: Tensor, inputs: PromptPass | DecodePass) -> Heads:
        a, num, adapters = self._shape, len(x), inputs.adapters
        down = self._down(x, adapters)
        widths = [down.shape[1] - a.kv_rank - a.rope_dim, a.kv_rank, a.rope_dim]
        queries, latent, rotary_key = torch.split(down, widths, dim=1)
        if self._query_norm is not None:
            queries = self._query_up(self._query_norm(queries), adapters)
        q, rotary_query = torch.split(queries.reshape(num, a.num_heads, -1), [a.nope_dim, a.rope_dim], dim=-1)
        up = self._up(self._norm(latent), adapters).view(num, a.num_heads, -1)
        k, v = torch.split(up, [a.nope_dim, a.value_dim], dim=-1)
        rotary_query = rotate(rotary_query, self._config, inputs.cos, inputs.sin)
        rotary_key = rotate(rotary_key.unsqueeze(1), self._config, inputs.cos, inputs.sin)
        q = torch.cat((q, rotary_query), dim=-1)
        k = torch.cat((k, rotary_key.expand(-1, a.num_heads, -1)), dim=-1)
        return Heads(self._widen(q), self._widen(k), self._widen(v))

    def _widen(self, x: Tensor) -> Tensor:
        """Heads of the width of the cache. [N, H, D]"""
        return F.pad(x, (0, self._width - x.shape[-1])) if x.shape[-1] < self._width else x
