"""Attention of a decoder layer, over padded prompts and over the KV cache.

Shape legend: N rows of a pass (P * T or B), P prompts, T tokens of a padded prompt, B rows (slots), S cached positions,
H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.decoder_ops import attend_cached, attend_prompts, split_heads


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PromptPass:
    """Inputs of a pass over padded prompts that all layers share."""

    num: int  # P
    length: int  # T
    cos: Tensor  # [P * T, 1, D]
    sin: Tensor
    adapters: RowAdapters | None  # of the P * T tokens


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class DecodePass:
    """Inputs of a decode step that all layers share."""

    cos: Tensor  # [B, 1, D]
    sin: Tensor
    write: Tensor  # [B * K] indices of the new keys in the flattened rows and positions of the cache
    mask: Tensor  # [B * K, 1, S] added to the scores: 0 or -inf
    adapters: RowAdapters | None  # of the B rows


class Attention(Protocol):
    """Mixes the tokens of a sequence in one layer. It knows its place in the caches."""

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """Output [P * T, hidden] for normalised hidden states; writes what later tokens need into `cache`."""

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """Output [B, hidden] for one more token in each row; writes what later tokens need into `cache`."""

    def projections(self) -> Iterator[Projection]:
        """The linear layers, which may have adapters."""


class GroupedAttention:
    """Grouped-query attention with rotary positions.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.0.self_attn.`.
        config: of the model.
        index: of the layer among those with keys and values.
    """

    def __init__(self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> None:
        self._config, self._index = config, index
        self.qkv = loader.linear([f"{prefix}{part}_proj" for part in "qkv"])  # to (H + 2K) D
        query_norm, key_norm = (loader.load_optional(f"{prefix}{part}_norm.weight") for part in "qk")
        self._norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
        self.output = loader.linear([f"{prefix}o_proj"])

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """See `Attention`."""
        a, num, length = self._config.architecture, inputs.num, inputs.length
        q, k, v = self._project(x, inputs)
        keys, values = cache.values[self._index]
        keys.copy_(k.view(num, length, a.num_kv_heads, a.head_dim).transpose(1, 2))
        values.copy_(v.reshape(num, length, a.num_kv_heads, a.head_dim).transpose(1, 2))
        queries = q.view(num, length, a.num_heads, a.head_dim).transpose(1, 2)
        mixed = attend_prompts(queries, keys, values)
        return self.output(mixed.transpose(1, 2).reshape(num * length, -1), inputs.adapters)

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """See `Attention`."""
        a, num = self._config.architecture, x.shape[0]
        rows = num * a.num_kv_heads
        q, k, v = self._project(x, inputs)
        keys, values = cache.values[self._index]
        # A row of the cache is one sequence and one KV head: [B * K, S, D], flattened to [B * K * S, D].
        keys.view(-1, a.head_dim).index_copy_(0, inputs.write, k.reshape(rows, a.head_dim))
        values.view(-1, a.head_dim).index_copy_(0, inputs.write, v.reshape(rows, a.head_dim))
        mixed = attend_cached(q.reshape(rows, a.group_size, a.head_dim), keys[:rows], values[:rows], inputs.mask)
        return self.output(mixed.view(num, -1), inputs.adapters)

    def projections(self) -> Iterator[Projection]:
        """See `Attention`."""
        yield from (self.qkv, self.output)

    def _project(self, x: Tensor, inputs: PromptPass | DecodePass) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, D], keys and values [N, K, D]."""
        qkv = self.qkv(x, inputs.adapters)
        return split_heads(qkv, self._config, norms=self._norms, cos=inputs.cos, sin=inputs.sin)
