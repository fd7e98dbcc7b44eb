"""Attention of a decoder layer, over padded prompts and over the KV cache.

Shape legend: N rows of a pass (P * T or B), P prompts, T tokens of a padded prompt, B rows (slots), S cached positions,
H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.decoder_ops import (
    attend_cached,
    attend_prompts,
    attend_prompts_with_sinks,
    in_whole_vectors,
    split_heads,
)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PromptPass:
    """Inputs of a pass over padded prompts that all layers share."""

    num: int  # P
    length: int  # T
    lengths: Tensor  # tokens of each prompt before its padding [P]
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
    window_mask: Tensor  # the same in layers with a sliding window
    adapters: RowAdapters | None  # of the B rows


class Attention(Protocol):
    """Mixes the tokens of a sequence in one layer. It knows its place in the caches."""

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """Output [P * T, hidden] for normalised hidden states; writes what later tokens need into `cache`."""

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """Output [B, hidden] for one more token in each row; writes what later tokens need into `cache`."""

    def projections(self) -> Iterator[Projection]:
        """The linear layers, which may have adapters."""


class Heads(NamedTuple):
    """Inputs of attention, of the width of the cache."""

    queries: Tensor  # [N, H, D]
    keys: Tensor  # [N, K, D]
    values: Tensor  # [N, K, D]
    gate: Tensor | None = None  # its sigmoid multiplies the output [N, H D]; None: there is none


class CachedAttention(ABC):
    """Attention over keys and values that are stored for every token.

    Heads in the cache have the wider of the widths of keys and values, and zeros in the remaining dimensions of the
    others, which change no score: a product over a part of each row would first copy that part.

    Args:
        config: of the model.
        index: of the layer among those with keys and values.
        sinks: logit of each head that takes part in its softmax [H]; None: no such.
        window: tokens that a token attends to, including itself; None: all before it.
    """

    output: Projection

    def __init__(
        self, config: DecoderConfig, *, index: int, sinks: Tensor | None = None, window: int | None = None
    ) -> None:
        self._config, self._index, self._sinks, self._window = config, index, sinks, window
        a = config.architecture
        self._heads, self._width, self._value_width = a.expanded_heads, a.expanded_width, a.value_width
        self._scale = config.attention_scale  # None: that of the width of the cache

    @abstractmethod
    def _project(self, x: Tensor, inputs: PromptPass | DecodePass) -> Heads:
        """Heads of hidden states [N, hidden]."""

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """See `Attention`."""
        num, length = inputs.num, inputs.length
        q, k, v, gate = self._project(x, inputs)
        keys, values = cache.values[self._index]
        keys.copy_(k.view(num, length, self._heads, self._width).transpose(1, 2))
        values.copy_(v.reshape(num, length, self._heads, self._width).transpose(1, 2))
        queries = q.view(num, length, -1, self._width).transpose(1, 2)
        if self._sinks is None:
            mixed = attend_prompts(queries, keys, values, scale=self._scale)
        else:
            sinks, window = self._sinks, self._window
            mixed = attend_prompts_with_sinks(queries, keys, values, sinks_H=sinks, window=window)
        return self._finish(mixed.transpose(1, 2).reshape(num * length, -1), gate, inputs.adapters)

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """See `Attention`."""
        num = x.shape[0]
        rows = num * self._heads
        q, k, v, gate = self._project(x, inputs)
        keys, values = cache.values[self._index]
        # A row of the cache is one sequence and one KV head: [B * K, S, D], flattened to [B * K * S, D].
        keys.view(-1, self._width).index_copy_(0, inputs.write, k.reshape(rows, self._width))
        values.view(-1, self._width).index_copy_(0, inputs.write, v.reshape(rows, self._width))
        mask = inputs.mask if self._window is None else inputs.window_mask
        sinks = None if self._sinks is None else self._sinks.view(self._heads, -1, 1).repeat(num, 1, 1)
        queries = q.reshape(rows, -1, self._width)
        mixed = attend_cached(queries, keys[:rows], values[:rows], mask, scale=self._scale, sinks=sinks)
        return self._finish(mixed.view(num, -1), gate, inputs.adapters)

    @abstractmethod
    def projections(self) -> Iterator[Projection]:
        """See `Attention`."""

    def _finish(self, mixed: Tensor, gate: Tensor | None, adapters: RowAdapters | None) -> Tensor:
        if self._value_width < self._width:
            mixed = mixed.view(len(mixed), -1, self._width)[..., : self._value_width].flatten(1)
        if gate is not None:
            mixed = mixed * in_whole_vectors(torch.sigmoid, gate)
        return self.output(mixed, adapters)


class GroupedAttention(CachedAttention):
    """Grouped-query attention.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.0.self_attn.`.
        config: of the model.
        index: of the layer among those with keys and values.
        window: see `CachedAttention`.
    """

    def __init__(
        self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int, window: int | None = None
    ) -> None:
        super().__init__(config, index=index, sinks=loader.load_optional(f"{prefix}sinks"), window=window)
        self.qkv = loader.linear([f"{prefix}{part}_proj" for part in "qkv"])  # to (H + 2K) D
        query_norm, key_norm = (loader.load_optional(f"{prefix}{part}_norm.weight") for part in "qk")
        self._norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
        self.output = loader.linear([f"{prefix}o_proj"])

    def projections(self) -> Iterator[Projection]:
        """See `Attention`."""
        yield from (self.qkv, self.output)

    def _project(self, x: Tensor, inputs: PromptPass | DecodePass) -> Heads:
        qkv = self.qkv(x, inputs.adapters)
        return Heads(*split_heads(qkv, self._config, norms=self._norms, cos=inputs.cos, sin=inputs.sin))
