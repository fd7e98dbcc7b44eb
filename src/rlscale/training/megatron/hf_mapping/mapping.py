"""One weight under both names, and the lists that a family is made of.

In names `{i}` is the layer, counted over the whole model, and `{j}` the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Layout(StrEnum):
    """How the tensors of Hugging Face make up one of Megatron-core, and what of it a tensor-parallel rank holds."""

    whole = "whole"  # all of it, on every rank
    rows = "rows"  # a share of the rows
    columns = "columns"  # a share of the columns
    vocabulary = "vocabulary"  # a share of the rows, after zeros were added to make them enough
    qkv = "qkv"  # of each group of heads queries, then key, then value; a share of the groups
    gated = "gated"  # a share of the gate's rows, then the same share of the other matrix's
    gated_fused = "gated_fused"  # the same, from one tensor with both


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter of Megatron-core and the tensors of Hugging Face that it is made of."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Layout.whole

    def at(self, *, layer: int | str = "", expert: int | str = "") -> Weight:
        """The same with the numbers put in."""
        numbers = {"i": layer, "j": expert}
        return Weight(
            megatron=self.megatron.format(**numbers),
            hf=tuple(name.format(**numbers) for name in self.hf),
            layout=self.layout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The weights of a family, in the order of its Hugging Face model."""

    before: tuple[Weight, ...]
    attention: tuple[Weight, ...]  # of every layer
    dense: tuple[Weight, ...]  # of a layer without experts
    router: tuple[Weight, ...] = ()  # of a layer with experts
    expert: tuple[Weight, ...] = ()  # of each of its experts
    norms: tuple[Weight, ...] = field(default=())  # at the end of every layer
    after: tuple[Weight, ...]

    def layer(self, index: int, *, num_experts: int) -> Iterator[tuple[Weight, int | None]]:
        """The weights of a layer, each with its expert.

        Args:
            index: of the layer in the whole model.
            num_experts: that the layer has; 0: it has a dense MLP.
        """
        for weight in self.attention:
            yield weight.at(layer=index), None
        for weight in self.router if num_experts else self.dense:
            yield weight.at(layer=index), None
        for j in range(num_experts):
            for weight in self.expert:
                yield weight.at(layer=index, expert=j), j
        for weight in self.norms:
            yield weight.at(layer=index), None
