"""A weight under its Hugging Face and its Megatron-core name, and the table of names of a family.

In names `{i}` is the layer, counted over the whole model, and `{j}` the expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum


class TensorLayout(StrEnum):
    """Rule that builds a Megatron-core tensor from Hugging Face tensors and shards it over tensor-parallel ranks."""

    whole = "whole"  # replicated on every rank
    rows = "rows"  # sharded along the rows
    rows_swapped = "rows_swapped"  # the same, with the two halves of the columns swapped
    columns = "columns"  # sharded along the columns
    vocabulary = "vocabulary"  # sharded along the rows, after zero rows pad them to a multiple of the ranks
    qkv = "qkv"  # per group of heads: queries, then key, then value; sharded along the groups
    qkv_gated = "qkv_gated"  # the same, with the gates of the queries after the queries
    gated = "gated"  # a shard of the gate's rows, then the same shard of the up projection's rows
    gated_fused = "gated_fused"  # the same, from one tensor that holds both
    gated_pairs = "gated_pairs"  # the same, from one tensor whose rows alternate between both
    # Of a gated delta net: the shards of queries, keys, values, output gates, betas and decays, one after another.
    delta_heads = "delta_heads"  # from two tensors that are ordered by key head
    delta_parts = "delta_parts"  # from four tensors, the first with queries, keys and values one after another
    delta_conv = "delta_conv"  # of queries, keys and values only, from one tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A Megatron-core parameter and the Hugging Face tensors that it is built from."""

    megatron: str
    hf: tuple[str, ...]
    layout: TensorLayout = TensorLayout.whole
    only_with: str | None = None  # attribute of `Architecture`; models without it do not have the weight
    stacked: bool = False
    """Hugging Face has one tensor for all experts of a layer: transposed matrices [E, in, out], or vectors [E, out]."""

    def numbered(self, *, layer: int | str = "", expert: int | str = "") -> Weight:
        """The same weight with layer and expert filled into its names."""
        numbers = {"i": layer, "j": expert}
        names = tuple(name.format(**numbers) for name in self.hf)
        return replace(self, megatron=self.megatron.format(**numbers), hf=names)

    def moved(self, prefix: str) -> Weight:
        """The same weight in a model whose decoder has the names `prefix` instead of `model.`."""
        names = tuple(prefix + name.removeprefix("model.") if name.startswith("model.") else name for name in self.hf)
        return replace(self, hf=names)


@dataclass(frozen=True, kw_only=True, slots=True)
class HfNames:
    """The weights of a family, in the order of its Hugging Face model."""

    before: tuple[Weight, ...]
    attention: tuple[Weight, ...]  # of every layer, unless it has linear attention
    linear_attention: tuple[Weight, ...] = ()  # of a layer with linear attention
    dense: tuple[Weight, ...]  # of a layer without experts
    router: tuple[Weight, ...] = ()  # of a layer with experts
    expert: tuple[Weight, ...] = ()  # of each of its experts
    norms: tuple[Weight, ...] = ()  # at the end of every layer
    after: tuple[Weight, ...]

    def moved(self, prefix: str) -> HfNames:
        """The names of a model whose decoder has the names `prefix` instead of `model.`."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return replace(self, **{name: tuple(each.moved(prefix) for each in weights) for name, weights in parts.items()})

    def layer_weights(
        self, index: int, *, num_experts: int, is_linear: bool = False, without: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Weight, int | None]]:
        """The weights of a layer, each with the index of its expert.

        Args:
            index: of the layer in the whole model.
            num_experts: experts of the layer. 0: a dense MLP.
            is_linear: whether the layer has linear attention.
            without: features of `Weight.only_with` that the model does not have.
        """
        for weight, expert in self._every_weight(index, num_experts=num_experts, is_linear=is_linear):
            if weight.only_with not in without:
                yield weight, expert

    def _every_weight(self, index: int, *, num_experts: int, is_linear: bool) -> Iterator[tuple[Weight, int | None]]:
        for weight in self.linear_attention if is_linear else self.attention:
            yield weight.numbered(layer=index), None
        for weight in self.router if num_experts else self.dense:
            yield weight.numbered(layer=index), None
        for j in range(num_experts):
            for weight in self.expert:
                yield weight.numbered(layer=index, expert=j), j
        for weight in self.norms:
            yield weight.numbered(layer=index), None


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpNames:
    """The weights of a family's layers for multi-token prediction, which contain one of its decoder layers each."""

    hf_layer: str  # prefix of a layer: `{i}` is its index after those of the decoder, `{k}` its index among themselves
    own: tuple[Weight, ...]  # apart from the decoder layer; both names without the prefix of the layer
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensor of the model -> name without the prefix under which checkpoints repeat it in each layer."""

    def layer_weights(
        self,
        names: HfNames,
        k: int,
        *,
        num_layers: int,
        num_experts: int,
        without: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[Weight, int | None]]:
        """The weights of layer `k`, each with the index of its expert.

        Args:
            names: of the family's decoder layers.
            k: index of the layer, from 0.
            num_layers: decoder layers of the model.
            num_experts: as in `HfNames.layer_weights`.
            without: as in `HfNames.layer_weights`.
        """
        index, megatron = num_layers + k, f"mtp.layers.{k}"
        hf_layer = self.hf_layer.format(i=index, k=k)
        for weight in self.own:
            own = tuple(f"{hf_layer}.{name}" for name in weight.hf)
            yield replace(weight, megatron=f"{megatron}.{weight.megatron}", hf=own), None
        for weight, expert in names.layer_weights(index, num_experts=num_experts, without=without):
            inner = weight.megatron.removeprefix(f"decoder.layers.{index}.")
            hf = tuple(f"{hf_layer}.{name.removeprefix(f'model.layers.{index}.')}" for name in weight.hf)
            yield replace(weight, megatron=f"{megatron}.transformer_layer.{inner}", hf=hf), expert

    def has(self, name: str, *, num_layers: int) -> bool:
        """Whether a tensor of a checkpoint belongs to one of these layers."""
        pattern = self.hf_layer.replace(".", r"\.").replace("{i}", r"(?P<i>\d+)").replace("{k}", r"\d+")
        found = re.match(rf"{pattern}\.", name)
        return found is not None and int(found.groupdict().get("i", num_layers)) >= num_layers

    def copies_of(self, name: str, *, num_layers: int, num_mtp: int) -> Iterator[str]:
        """The names under which the layers repeat a tensor of the model."""
        copy = self.copies.get(name)
        for k in range(num_mtp if copy is not None else 0):
            yield f"{self.hf_layer.format(i=num_layers + k, k=k)}.{copy}"
