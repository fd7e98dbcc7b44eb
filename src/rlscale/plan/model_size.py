"""Parameters, cache and arithmetic of a decoder, from the figures of the config group `model`.

Shape legend: H hidden width, I width of an MLP, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlscale.architectures.hf_config import IMPLIED, architecture_fields, read_figures
from rlscale.config import ModelConfig
from rlscale.errors import ConfigError, Problem

Shape = tuple[int, ...]

NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Figures without which nothing can be counted; all others have a meaning when they are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Figures of a decoder: dense or with experts (`num_experts` > 0), with grouped-query or latent attention."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False  # the output layer is the embedding
    model_type: str | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    max_positions: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # width inside one expert
    num_shared_experts: int = 0
    num_dense_layers: int = 0  # first layers without experts, in a model that has experts
    q_rank: int = 0  # of compressed queries; 0: they are not compressed
    kv_rank: int = 0  # of compressed keys and values; 0: there is no latent attention
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0

    @property
    def is_latent(self) -> bool:
        return self.kv_rank > 0

    @property
    def query_width(self) -> int:
        """Width of one query or key head."""
        return self.nope_dim + self.rope_dim if self.is_latent else self.head_dim

    @property
    def value_width(self) -> int:
        return self.value_dim if self.is_latent else self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.num_dense_layers

    # -- parameters

    def attention_shapes(self) -> Iterator[Shape]:
        hidden, heads = self.hidden_size, self.num_heads
        if self.is_latent:
            if self.q_rank:
                yield from ((self.q_rank, hidden), (self.q_rank,), (heads * self.query_width, self.q_rank))
            else:
                yield (heads * self.query_width, hidden)
            yield from ((self.kv_rank + self.rope_dim, hidden), (self.kv_rank,))
            yield (heads * (self.nope_dim + self.value_dim), self.kv_rank)
        else:
            widths = [heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]
            yield from ((width, hidden) for width in widths)
            if self.attention_bias:
                yield from ((width,) for width in widths)
            if self.qk_norm:
                yield from ((self.head_dim,), (self.head_dim,))
        yield (hidden, heads * self.value_width)

    def mlp_shapes(self, layer: int) -> Iterator[Shape]:
        hidden = self.hidden_size
        if not self.has_experts(layer):
            yield from _gated(hidden, self.intermediate_size)
            return
        yield (self.num_experts, hidden)
        yield from ((self.num_experts, 2 * self.expert_size, hidden), (self.num_experts, hidden, self.expert_size))
        if self.num_shared_experts:
            yield from _gated(hidden, self.num_shared_experts * self.expert_size)

    def layer_shapes(self, layer: int) -> tuple[Shape, ...]:
        """Every weight of a decoder layer; experts of a layer are one tensor, as in transformers."""
        return _layer_shapes(self, self.num_dense_layers if self.has_experts(layer) else 0)

    @property
    def num_norms(self) -> int:
        """Norms of a layer over the whole width."""
        return 4 if self.model_type == "glm4" else 2

    def root_shapes(self) -> tuple[Shape, ...]:
        """Embedding, final norm and output layer."""
        table = (self.vocab_size, self.hidden_size)
        return (table, (self.hidden_size,), *(() if self.tied else (table,)))

    def layer_parameters(self, layer: int) -> int:
        return count(self.layer_shapes(layer))

    @property
    def kinds(self) -> Mapping[int, int]:
        """A layer of each kind, and how many are like it."""
        if not self.num_experts or not self.num_dense_layers:
            return {0: self.num_layers}
        return {0: self.num_dense_layers, self.num_dense_layers: self.num_layers - self.num_dense_layers}

    @property
    def root_parameters(self) -> int:
        return count(self.root_shapes())

    @property
    def parameters(self) -> int:
        return self.root_parameters + sum(self.layer_parameters(layer) * n for layer, n in self.kinds.items())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes, embedding and output layer included."""
        idle = self.num_experts - self.experts_per_token
        num_layers = self.num_layers - self.num_dense_layers if self.num_experts else 0
        return self.parameters - num_layers * idle * 3 * self.hidden_size * self.expert_size

    # -- arithmetic

    def forward_flops(self, *, tokens: float, context: float, logit_rows: float) -> float:
        """Floating-point operations of a forward pass; a multiply-add counts as two.

        Args:
            tokens: that are computed.
            context: tokens that each of them attends to, on average.
            logit_rows: tokens whose logits are computed.
        """
        table = self.vocab_size * self.hidden_size
        in_layers = self.active_parameters - self.root_parameters
        attention = 2 * self.num_layers * self.num_heads * (self.query_width + self.value_width) * context
        return tokens * (2 * in_layers + attention) + logit_rows * 2 * table

    def cache_bytes_per_token(self, *, dtype_bytes: int, ranks: int = 1) -> float:
        """Keys and values of one token on each of `ranks` that share the heads; latent ones are not divided."""
        if self.is_latent:
            return self.num_layers * (self.kv_rank + self.rope_dim) * dtype_bytes
        heads = max(1.0, self.num_kv_heads / ranks)
        return 2 * self.num_layers * heads * self.head_dim * dtype_bytes


@cache
def _layer_shapes(a: Architecture, like: int) -> tuple[Shape, ...]:
    """Of a layer of the kind of layer `like`; cached, as plans are made by the hundred to find one that fits."""
    return (*a.attention_shapes(), *a.mlp_shapes(like), *[(a.hidden_size,)] * a.num_norms)


@cache
def count(shapes: tuple[Shape, ...]) -> int:
    """Numbers in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def route_bytes_per_token(a: Architecture) -> int:
    """As `types.RouteShape` has it, whose module loads what a plan does without."""
    return a.num_layers * a.experts_per_token * (1 if a.num_experts <= 255 else 2)


def _gated(hidden: int, width: int) -> list[Shape]:
    return [(width, hidden), (width, hidden), (hidden, width)]


def architecture_of(model: ModelConfig) -> Architecture:
    """The architecture that a run has: from the figures of the config, else from the checkpoint's `config.json`.

    Raises:
        ConfigError: figures are missing, and there is no `config.json` on this machine to read them from.
    """
    figures = architecture_fields(model)
    missing = [name for name in NEEDED if name not in figures]
    if missing:
        fix = "choose a model whose figures are known (model=qwen3_4b), set it, or give a checkpoint on this machine"
        raise ConfigError(
            [Problem(path=f"model.{name}", rule="be known to plan a run", value="null", fix=fix) for name in missing]
        )
    return _from_figures(figures)


def reference_of(model: ModelConfig, policy: Architecture) -> Architecture:
    """The architecture of the reference model: that of `model.ref_load` where it can be read, else the policy's."""
    figures = read_figures(model.ref_load)
    return _from_figures(figures) if all(name in figures for name in NEEDED) else policy


def _from_figures(given: Mapping[str, Any]) -> Architecture:
    kind = given.get("model_type")
    figures = {**IMPLIED.get(str(kind), {}), **given}
    heads, hidden = figures["num_attention_heads"], figures["hidden_size"]
    return Architecture(
        num_layers=figures["num_layers"],
        hidden_size=hidden,
        intermediate_size=figures.get("intermediate_size") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=figures.get("num_key_value_heads") or heads,
        head_dim=figures.get("head_dim") or hidden // heads,
        vocab_size=figures["vocab_size"],
        tied=bool(figures.get("tie_word_embeddings", False)),
        model_type=kind,
        attention_bias=bool(figures.get("attention_bias", False)),
        qk_norm=bool(figures.get("use_qk_norm", False)),
        max_positions=figures.get("max_position_embeddings"),
        num_experts=figures.get("num_experts") or 0,
        experts_per_token=figures.get("num_experts_per_tok") or 0,
        expert_size=figures.get("moe_intermediate_size") or 0,
        num_shared_experts=figures.get("num_shared_experts") or 0,
        num_dense_layers=figures.get("first_k_dense_replace") or 0,
        q_rank=figures.get("q_lora_rank") or 0,
        kv_rank=figures.get("kv_lora_rank") or 0,
        nope_dim=figures.get("qk_nope_head_dim") or 0,
        rope_dim=figures.get("qk_rope_head_dim") or 0,
        value_dim=figures.get("v_head_dim") or 0,
    )
