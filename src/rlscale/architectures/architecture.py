"""The shape of a decoder, and the parameters, cache bytes and operations that follow from it.

Views add what one part needs: `models.decoder_config.DecoderConfig` for the embedded engine,
`training.megatron.model.transformer_config.MegatronArchitecture` for Megatron-core.

Shape legend: H hidden width, I width of an MLP, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlscale.architectures.delta_shape import DeltaShape
from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import hf_fields
from rlscale.architectures.tower_shape import TowerShape
from rlscale.architectures.weight_names import TensorLayout

Shape = tuple[int, ...]

REQUIRED_FIELDS = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Architecture fields that must be known. All others have a default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardCost:
    """Floating-point operations of a forward pass, by what they grow with; a multiply-add counts as two."""

    per_token: int  # linear layers; of experts only those that a token uses
    per_pair: int  # attention of a token to one token, in all layers
    per_logit_row: int  # output layer
    window: int = 0  # tokens that a token attends to in layers with a sliding window
    window_share: float = 0.0  # layers with a sliding window, as a fraction of all

    def count_pairs(self, length: float) -> float:
        """Pairs of tokens in causal attention of a sample, on average over the layers."""
        # In a layer with a window the tokens behind it miss the pairs of a sample as long as they are.
        return (length**2 - self.window_share * max(length - self.window, 0) ** 2) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder: dense or with experts (`num_experts` > 0), with grouped-query or latent attention (`kv_rank` > 0).

    Example:
        a = Architecture.from_config_json(json.loads(Path("config.json").read_text()))
        a.parameters, a.cache_bytes_per_token(dtype_bytes=2)
    """

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
    wide_qk_norm: bool = False  # over all heads together
    sinks: bool = False  # of attention; the output projection, the router and experts have biases, too
    max_positions: int | None = None
    window: int = 0  # tokens that a layer with a sliding window attends to
    num_window_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # width inside one expert
    num_shared_experts: int = 0
    gated_shared_size: int = 0  # width of a shared expert with a gate, as in Qwen2-MoE; 0: it has none
    dense_layers: tuple[int, ...] = ()  # layers without experts, in a model that has experts
    q_rank: int = 0  # of compressed queries; 0: queries are not compressed
    kv_rank: int = 0  # of compressed keys and values; 0: no latent attention
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    linear_layers: tuple[int, ...] = ()  # layers with linear attention
    delta: DeltaShape | None = None  # of these layers; the others have attention with an output gate. None: no such
    tower: TowerShape | None = None  # of a model with images; None: text only, or not known

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Architecture:
        """The architecture of fields by key of the group `model`; `REQUIRED_FIELDS` must be among them."""
        model_type = given.get("model_type")
        fields = {**find_family(model_type).implied, **given}
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        dense = fields.get("dense_layers", range(fields.get("first_k_dense_replace") or 0))
        return cls(
            num_layers=fields["num_layers"],
            hidden_size=hidden,
            intermediate_size=fields.get("intermediate_size") or 4 * hidden,
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or hidden // heads,
            vocab_size=fields["vocab_size"],
            tied=bool(fields.get("tie_word_embeddings", False)),
            model_type=model_type,
            attention_bias=bool(fields.get("attention_bias", False)),
            qk_norm=bool(fields.get("use_qk_norm", False)),
            wide_qk_norm=find_family(model_type).wide_qk_norm,
            sinks=find_family(model_type).sinks,
            max_positions=fields.get("max_position_embeddings"),
            window=fields.get("window") or 0,
            num_window_layers=fields.get("num_window_layers") or 0,
            num_experts=fields.get("num_experts") or 0,
            experts_per_token=fields.get("num_experts_per_tok") or 0,
            expert_size=fields.get("moe_intermediate_size") or 0,
            num_shared_experts=fields.get("num_shared_experts") or 0,
            gated_shared_size=fields.get("gated_shared_size") or 0,
            dense_layers=tuple(layer for layer in dense if layer < fields["num_layers"]),
            q_rank=fields.get("q_lora_rank") or 0,
            kv_rank=fields.get("kv_lora_rank") or 0,
            nope_dim=fields.get("qk_nope_head_dim") or 0,
            rope_dim=fields.get("qk_rope_head_dim") or 0,
            value_dim=fields.get("v_head_dim") or 0,
            linear_layers=tuple(fields.get("linear_layers", ())),
            delta=DeltaShape.from_fields(fields),
        )

    @classmethod
    def from_config_json(cls, config_json: Mapping[str, Any]) -> Architecture:
        """The architecture of the content of a `config.json`."""
        return cls.from_fields(hf_fields(config_json))

    @property
    def is_latent(self) -> bool:
        """Whether it has multi-head latent attention."""
        return self.kv_rank > 0

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Width of one query or key head."""
        return self.nope_dim + self.rope_dim if self.is_latent else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.value_dim if self.is_latent else self.head_dim

    @property
    def expanded_heads(self) -> int:
        """Key-value heads in the cache of an engine that expands latents to the keys and values of every head."""
        return self.num_heads if self.is_latent else self.num_kv_heads

    @property
    def expanded_width(self) -> int:
        """Width of a head in such a cache: that of keys or of values, whichever is wider."""
        return max(self.query_width, self.value_width)

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Elements of the weights that normalise queries and keys."""
        if not self.wide_qk_norm:
            return self.head_dim, self.head_dim
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def missing_features(self) -> frozenset[str]:
        """The values of `Weight.only_with` whose weights it does not have."""
        return frozenset(name for name in ("attention_bias", "qk_norm") if not getattr(self, name))

    @property
    def has_post_norms(self) -> bool:
        """Whether the outputs of attention and MLP are normalised before they are added."""
        return find_family(self.model_type).post_norms

    @property
    def num_norms(self) -> int:
        """Norms of a layer over the whole hidden width."""
        return 4 if self.has_post_norms else 2

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values; the others have linear attention."""
        return self.num_layers - len(self.linear_layers)

    def state_index(self, layer: int) -> int:
        """Index of a layer among those with linear attention, or else among the others."""
        before = sum(other < layer for other in self.linear_layers)
        return before if layer in self.linear_layers else layer - before

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of a dense MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def shared_size(self) -> int:
        """Width of all shared experts of a layer together."""
        return self.gated_shared_size or self.num_shared_experts * self.expert_size

    @property
    def has_delta_by_head(self) -> bool:
        """Whether transformers keeps the projections of a gated delta net in two tensors, ordered by head."""
        names = find_family(self.model_type).hf_names
        return names is not None and any(each.layout == TensorLayout.delta_heads for each in names.linear_attention)

    # -- parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        biases = 2 * self.expert_size + self.hidden_size if self.sinks else 0
        return 3 * self.hidden_size * self.expert_size + biases

    def attention_shapes(self, layer: int) -> Iterator[Shape]:
        """Shapes of the weights of attention in a layer."""
        hidden, heads = self.hidden_size, self.num_heads
        if self.delta is not None and layer in self.linear_layers:
            yield from (shape for _, shape in self.delta.named_shapes(hidden, by_head=self.has_delta_by_head))
            return
        if self.is_latent:
            if self.q_rank:
                yield from ((self.q_rank, hidden), (self.q_rank,), (heads * self.query_width, self.q_rank))
            else:
                yield (heads * self.query_width, hidden)
            # One key part with positions for all heads, next to the compressed keys and values.
            yield from ((self.kv_rank + self.rope_dim, hidden), (self.kv_rank,))
            yield (heads * (self.nope_dim + self.value_dim), self.kv_rank)
        else:
            # A head and its output gate are rows of one matrix.
            widths = [heads * self.head_dim * (2 if self.delta else 1), *[self.num_kv_heads * self.head_dim] * 2]
            yield from ((width, hidden) for width in widths)
            if self.attention_bias:
                yield from ((width,) for width in widths)
            if self.qk_norm:
                yield from ((width,) for width in self.qk_norm_widths)
        yield (hidden, heads * self.value_width)
        if self.sinks:
            yield from ((hidden,), (heads,))

    def mlp_shapes(self, layer: int) -> Iterator[Shape]:
        """Shapes of the weights of the MLP, or of router and experts, of a layer."""
        hidden = self.hidden_size
        if not self.has_experts(layer):
            yield from _gated(hidden, self.intermediate_size)
            return
        yield (self.num_experts, hidden)
        if self.sinks:
            number, width = self.num_experts, self.expert_size
            # Each followed by its biases.
            yield from ((number,), (number, hidden, 2 * width), (number, 2 * width))
            yield from ((number, width, hidden), (number, hidden))
            return
        # Experts of a layer are one tensor, as in transformers.
        yield from ((self.num_experts, 2 * self.expert_size, hidden), (self.num_experts, hidden, self.expert_size))
        if self.shared_size:
            yield from _gated(hidden, self.shared_size)
        if self.gated_shared_size:
            yield (1, hidden)

    def layer_shapes(self, layer: int) -> tuple[Shape, ...]:
        """Shapes of every weight of a decoder layer."""
        return _layer_shapes(self, next(j for j in self.kinds if self.kind(j) == self.kind(layer)))

    def root_shapes(self) -> tuple[Shape, ...]:
        """Shapes of embedding, final norm, output layer, and of the vision tower without its blocks."""
        table = (self.vocab_size, self.hidden_size)
        tower = () if self.tower is None else (shape for _, shape in self.tower.other_shapes())
        return (table, (self.hidden_size,), *(() if self.tied else (table,)), *tower)

    def layer_parameters(self, layer: int) -> int:
        """Parameters of a decoder layer."""
        return count_elements(self.layer_shapes(layer))

    def kind(self, layer: int) -> tuple[bool, bool]:
        """Whether a layer has experts, and whether it has linear attention."""
        return self.has_experts(layer), layer in self.linear_layers

    @property
    def kinds(self) -> Mapping[int, int]:
        """Index of the first layer of each kind -> number of layers of that kind."""
        return _kinds(self)

    def count_kinds(self, start: int, stop: int) -> Mapping[int, int]:
        """The same of the layers from `start` up to `stop`; the keys are first layers of the whole model."""
        if len(self.kinds) == 1:
            return {0: max(stop - start, 0)}
        found = Counter(map(self.kind, range(start, stop)))
        return {j: found[self.kind(j)] for j in self.kinds}

    @property
    def is_mixed(self) -> bool:
        """Whether only some of its layers have experts."""
        return 0 < self.num_expert_layers < self.num_layers

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the layers and of the blocks of a vision tower."""
        return count_elements(self.root_shapes())

    @property
    def tower_block_parameters(self) -> int:
        """Parameters of all blocks of the vision tower."""
        return 0 if self.tower is None else self.tower.depth * self.tower.block_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        layers = sum(self.layer_parameters(layer) * n for layer, n in self.kinds.items())
        return self.root_parameters + layers + self.tower_block_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, including embedding and output layer."""
        idle = self.num_experts - self.experts_per_token
        return self.parameters - self.num_expert_layers * idle * self.expert_parameters

    # -- operations and cache

    @property
    def forward_cost(self) -> ForwardCost:
        """Floating-point operations of a forward pass."""
        widths = self.query_width + self.value_width  # products with keys, and with values
        recurrence = 0 if self.delta is None else len(self.linear_layers) * self.delta.flops_per_token
        return ForwardCost(
            per_token=2 * (self.active_parameters - self.root_parameters - self.tower_block_parameters) + recurrence,
            per_pair=2 * self.num_attention_layers * self.num_heads * widths,
            per_logit_row=2 * self.vocab_size * self.hidden_size,
            window=self.window,
            window_share=self.num_window_layers / self.num_layers,
        )

    def forward_flops(self, *, tokens: float, context: float, logit_rows: float) -> float:
        """Floating-point operations of a forward pass.

        Args:
            tokens: tokens to compute.
            context: tokens that each of them attends to, on average.
            logit_rows: tokens whose logits are computed.
        """
        cost = self.forward_cost
        return tokens * (cost.per_token + cost.per_pair * context) + logit_rows * cost.per_logit_row

    def cache_bytes_per_token(self, *, dtype_bytes: int, ranks: int = 1) -> float:
        """Bytes of keys and values of one token on each of `ranks` tensor-parallel ranks.

        The state of linear attention is not among them: it has the same size for every length.
        """
        if self.is_latent:
            # Latents are shared by all heads, so every rank holds them whole.
            return self.num_layers * (self.kv_rank + self.rope_dim) * dtype_bytes
        # A rank holds at least one key head.
        heads = max(1.0, self.num_kv_heads / ranks)
        return 2 * self.num_attention_layers * heads * self.head_dim * dtype_bytes

    def expanded_cache_bytes_per_token(self, *, dtype_bytes: int) -> int:
        """The same of an engine on one rank that expands latents, as the embedded engine does."""
        per_layer = 2 * self.expanded_heads * self.expanded_width * dtype_bytes
        return self.num_attention_layers * per_layer

    def state_bytes(self, *, dtype_bytes: int) -> int:
        """Bytes of the states of linear attention of one sequence, on one rank. The same for every length."""
        return 0 if self.delta is None else len(self.linear_layers) * self.delta.state_bytes(dtype_bytes=dtype_bytes)


@cache
def _kinds(a: Architecture) -> Mapping[int, int]:
    kinds = [a.kind(layer) for layer in range(a.num_layers)]
    return {kinds.index(kind): number for kind, number in Counter(kinds).items()} or {0: 0}


@cache
def _layer_shapes(a: Architecture, like: int) -> tuple[Shape, ...]:
    """Shapes of a layer of the kind of layer `like`. Cached: suggestions come from hundreds of plans of one model."""
    return (*a.attention_shapes(like), *a.mlp_shapes(like), *[(a.hidden_size,)] * a.num_norms)


@cache
def count_elements(shapes: tuple[Shape, ...]) -> int:
    """Number of elements in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def _gated(hidden: int, width: int) -> list[Shape]:
    return [(width, hidden), (width, hidden), (hidden, width)]
