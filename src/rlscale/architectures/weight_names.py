"""A weight under its Hugging Face and its Megatron-core name, and the table of names of a family.

In names `{i}` is the layer, counted over the whole model, and `{j}` the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class TensorLayout(StrEnum):
    """Rule that builds a Megatron-core tensor from Hugging Face tensors and shards it over tensor-parallel ranks."""

    whole = "whole"  # replicated on every rank
    rows = "rows"  # sharded along the rows
    columns = "columns"  # sharded along the columns
    vocabulary = "vocabulary"  # sharded along the rows, after zero rows pad them to a multiple of the ranks
    qkv = "qkv"  # per group of heads: queries, then key, then value; sharded along the groups
    gated = "gated"  # a shard of the gate's rows, then the same shard of the up projection's rows
    gated_fused = "gated_fused"  # the same, from one tensor that holds both


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A Megatron-core parameter and the Hugging Face tensors that it is built from."""

    megatron: str
    hf: tuple[str, ...]
    layout: TensorLayout = TensorLayout.whole
    only_with: str | None = None  # attribute of `Architecture`; models without it do not have the weight

    def numbered(self, *, layer: int | str = "", expert: int | str = "") -> Weight:
        """The same weight with layer and expert filled into its names."""
        numbers = {"i": layer, "j": expert}
        names = tuple(name.format(**numbers) for name in self.hf)
        return replace(self, megatron=self.megatron.format(**numbers), hf=names)


@dataclass(frozen=True, kw_only=True, slots=True)
class HfNames:
    """The weights of a family, in the order of its Hugging Face model."""

    before: tuple[Weight, ...]
    attention: tuple[Weight, ...]  # of every layer
    dense: tuple[Weight, ...]  # of a layer without experts
    router: tuple[Weight, ...] = ()  # of a layer with experts
    expert: tuple[Weight, ...] = ()  # of each of its experts
    norms: tuple[Weight, ...] = ()  # at the end of every layer
    after: tuple[Weight, ...]

    def layer_weights(
        self, index: int, *, num_experts: int, without: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Weight, int | None]]:
        """The weights of a layer, each with the index of its expert.

        Args:
            index: of the layer in the whole model.
            num_experts: experts of the layer. 0: a dense MLP.
            without: features of `Weight.only_with` that the model does not have.
        """
        for weight, expert in self._every_weight(index, num_experts=num_experts):
            if weight.only_with not in without:
                yield weight, expert

    def _every_weight(self, index: int, *, num_experts: int) -> Iterator[tuple[Weight, int | None]]:
        for weight in self.attention:
            yield weight.numbered(layer=index), None
        for weight in self.router if num_experts else self.dense:
            yield weight.numbered(layer=index), None
        for j in range(num_experts):
            for weight in self.expert:
                yield weight.numbered(layer=index, expert=j), j
        for weight in self.norms:
            yield weight.numbered(layer=index), None
