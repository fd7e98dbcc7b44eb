"""Low-rank adapters (LoRA, arXiv:2106.09685) in the linear layers of a Megatron-core model.

A layer with weight W [out, in] acts as W x + scale * B A x. A fused layer has separate adapters for each Hugging Face
projection in it, so that they are those of peft.

    layer            A [rank, in]          B [out, rank]        summed over the tensor-parallel ranks
    column-parallel  whole on each rank    divided by rows      the gradient of A x
    row-parallel     divided by columns    whole on each rank   A x
    replicated       whole                 whole                nothing

So only tensors of width `rank` are communicated. With sequence parallelism a rank has A x, or the output, for its
positions only: the gradients of the whole half, or halves, are summed over the ranks with those of the norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlscale.architectures.weight_names import TensorLayout
from rlscale.training.megatron.model.layers import mark_sequence_parallel, rms_norm

ADAPTERS = "adapters"
"""Name of the submodule of a linear layer that holds its adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """The adapters of a whole model; the same on every rank."""

    rank: int
    alpha: int
    layers: tuple[str, ...]  # Hugging Face names of the layers that have one

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    @property
    def peft_config(self) -> dict[str, Any]:
        """Rank, alpha and layers, by peft's keys."""
        targets = sorted({name.split(".")[-1] for name in self.layers})
        return {"r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}


@dataclass(frozen=True, kw_only=True, slots=True)
class Projections:
    """The Hugging Face projections in a linear layer, as this rank holds them."""

    layout: TensorLayout  # of the weight
    widths: Mapping[str, int]  # name -> output features on this rank, in the order of the layout
    num_groups: int = 1  # of heads that share a key head, on this rank
    queries_per_group: int = 1  # query heads
    parts: tuple[int, ...] = ()  # output features of a gated delta net on this rank, in the order of `DeltaShape.parts`

    @classmethod
    def from_layer(
        cls,
        layout: TensorLayout,
        names: Sequence[str],
        *,
        num_rows: int,
        num_groups: int,
        queries_per_group: int,
        parts: tuple[int, ...] = (),
    ) -> Projections:
        """The projections in a layer with `num_rows` output features on this rank.

        Args:
            layout: of the weight.
            names: of the projections.
            num_rows: output features on this rank.
            num_groups: groups of heads that share a key head, on this rank.
            queries_per_group: query heads.
            parts: as the field.
        """
        sizes: tuple[int, ...] = (num_rows // len(names),) * len(names)
        if layout in (TensorLayout.qkv, TensorLayout.qkv_gated):
            # A group has the rows of its query heads, perhaps of their gates, of one key head and of one value head.
            queries = queries_per_group * (2 if layout == TensorLayout.qkv_gated else 1)
            rows = num_rows // (queries + 2)
            sizes = (rows * queries, rows, rows)
        elif layout == TensorLayout.delta_parts:
            sizes = (sum(parts[:3]), *parts[3:])
        elif layout == TensorLayout.delta_heads:
            sizes = (sum(parts[:4]), sum(parts[4:]))
        return cls(
            layout=layout,
            widths=dict(zip(names, sizes, strict=True)),
            num_groups=num_groups,
            queries_per_group=queries_per_group,
            parts=parts,
        )

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The output of the layer from the outputs of its projections, zeros for those that are missing. [..., out]"""
        some = next(iter(parts.values()))
        given = [
            parts[name] if name in parts else some.new_zeros(*some.shape[:-1], width)
            for name, width in self.widths.items()
        ]
        if len(given) == 1:
            return given[0]
        if self.layout in (TensorLayout.qkv, TensorLayout.qkv_gated):
            # Of each group first the queries, then the key and the value.
            by_group = [torch.unflatten(each, -1, (self.num_groups, -1)) for each in given]
            if self.layout == TensorLayout.qkv_gated:
                # Hugging Face has a query head and its gate as neighbours, Megatron-core all gates after all queries.
                heads = torch.unflatten(by_group[0], -1, (self.queries_per_group, 2, -1))
                by_group[0] = heads.transpose(-3, -2).flatten(-3)
            return torch.cat(by_group, dim=-1).flatten(-2)
        if self.layout == TensorLayout.delta_heads:
            # Hugging Face has all parts of a key head as neighbours.
            widths = [part // self.num_groups for part in self.parts]
            split = [
                torch.split(torch.unflatten(each, -1, (self.num_groups, -1)), some, dim=-1)
                for each, some in zip(given, (widths[:4], widths[4:]), strict=True)
            ]
            return torch.cat([part.flatten(-2) for some in split for part in some], dim=-1)
        return torch.cat(given, dim=-1)


class LowRank(nn.Module):
    """A and B of one projection, as this rank holds them."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)


class LayerAdapters(nn.ModuleDict):
    """The adapters of one linear layer, by projection.

    Args:
        parts: A [rank, in] and B [out, rank] of each projection that has an adapter, as this rank holds them.
        projections: all projections of the layer.
        scale: factor of B A.
        config: of the model.
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[Tensor, Tensor]],
        *,
        projections: Projections,
        scale: float,
        config: TransformerConfig,
    ) -> None:
        super().__init__({name: LowRank(a, b) for name, (a, b) in parts.items()})
        self.projections, self.scale, self.config = projections, scale, config
        self.is_on = True
        for each in self._parts.values():
            self._mark(each)

    @property
    def _parts(self) -> Mapping[str, LowRank]:
        return {name: part for name, part in self.items() if isinstance(part, LowRank)}

    @property
    def _layout(self) -> TensorLayout:
        return self.projections.layout

    def _mark(self, part: LowRank) -> None:
        """Sets the attributes with which Megatron-core sums gradients and counts them in the gradient norm."""
        halves = {TensorLayout.columns: (part.a, 1, [part.b]), TensorLayout.whole: (None, 0, [part.a, part.b])}
        divided, axis, whole = halves.get(self._layout, (part.b, 0, [part.a]))
        if divided is not None:
            set_tensor_model_parallel_attributes(divided, True, axis, 1)
        for parameter in whole:
            mark_sequence_parallel(parameter, self.config)

    def forward(self, x: Tensor) -> Tensor:
        """Computes scale * B A x for the input of the layer, after a norm in it. [..., in] -> [..., out]"""
        parts = self._parts
        # One product and one sum over the ranks for all projections.
        inner = self._summed(F.linear(x, torch.cat([each.a for each in parts.values()])))
        inners = torch.split(inner, [len(each.a) for each in parts.values()], dim=-1)
        outputs = {
            name: F.linear(own, each.b) * self.scale for own, (name, each) in zip(inners, parts.items(), strict=True)
        }
        return self.projections.join(outputs)

    def _summed(self, inner: Tensor) -> Tensor:
        """A x of the positions of the layer's output, such that its gradient is whole, too."""
        if self._layout == TensorLayout.whole:
            return inner
        is_row_parallel, shares_sequence = self._layout == TensorLayout.columns, bool(self.config.sequence_parallel)
        summed: Tensor = {
            (True, True): reduce_scatter_to_sequence_parallel_region,
            (True, False): reduce_from_tensor_model_parallel_region,
            (False, True): gather_from_sequence_parallel_region,  # its backward pass scatters the summed gradient
            (False, False): copy_to_tensor_model_parallel_region,
        }[is_row_parallel, shares_sequence](inner)
        return summed

    def merge(self, weight: Tensor) -> Tensor:
        """W + scale * B A for this rank's shard of W, computed in float32. No collective."""
        changes = {name: (each.b.float() @ each.a.float()).T for name, each in self._parts.items()}
        return (weight.float() + self.scale * self.projections.join(changes).T).to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The adapters for a checkpoint, each half with the axis along which it is divided."""
        half = {TensorLayout.columns: ("a", 1), TensorLayout.whole: None}.get(self._layout, ("b", 0))
        axes = {} if half is None else {f"{name}.{half[0]}": half[1] for name in self._parts}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        if self._layout == TensorLayout.gated_fused:
            # Each rank has rows of both halves of B.
            for key in [f"{prefix}{name}.b" for name in self._parts]:
                state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        if self._layout == TensorLayout.delta_parts and (key := f"{prefix}in_proj_qkv.b") in state:
            # Each rank has rows of queries, of keys and of values.
            names, sizes = ["query", "key", "value"], list(self.projections.parts[:3])
            state[key] = _split_tensor_factory(state[key], sizes, names, 0)
        return state


def adapt_layer(layer: nn.Module, adapters: LayerAdapters) -> None:
    """Adds adapters to a linear layer of Megatron-core, Transformer Engine, torch or this package, in place."""
    layer.add_module(ADAPTERS, adapters)
    # As torch's parametrisations do: the layer stays an instance of its class.
    layer.__class__ = _adapted(type(layer))  # type: ignore[arg-type]  # a class is hashable


def find_layer_adapters(modules: Iterable[nn.Module]) -> Iterator[LayerAdapters]:
    """The adapters inside of modules."""
    for module in modules:
        yield from (each for each in module.modules() if isinstance(each, LayerAdapters))


@contextmanager
def adapters_off(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Makes the model its base inside; for passes without gradient."""
    adapters = list(find_layer_adapters(chunks))
    for each in adapters:
        each.is_on = False
    try:
        yield
    finally:
        for each in adapters:
            each.is_on = True


@cache
def _adapted(kind: type[Any]) -> type[Any]:
    """The class of a linear layer with adapters."""

    def output_with_adapters(self: Any, input_: Tensor, *args: Any, **options: Any) -> Any:
        found = getattr(super(adapted, self), method)(input_, *args, **options)
        if not self.adapters.is_on:
            return found
        added = self.adapters(_normed(self, input_))
        # Layers of torch, in a vision tower, return the output alone, all others a bias with it.
        return (found[0] + added, found[1]) if isinstance(found, tuple) else found + added

    def sharded_state_dict(self: Any, prefix: str = "", *args: Any, **options: Any) -> dict[str, Any]:
        # The layer takes all its parameters but weight and bias for replicated ones.
        state: dict[str, Any] = super(adapted, self).sharded_state_dict(prefix, *args, **options)
        own: dict[str, Any] = self.adapters.sharded_state_dict(f"{prefix}{ADAPTERS}.", *args, **options)
        return state | own

    # A layer with a norm after its product adds the adapters before the norm.
    method = "project" if hasattr(kind, "project") else "forward"
    members: dict[str, Any] = {method: output_with_adapters}
    if hasattr(kind, "sharded_state_dict"):
        members["sharded_state_dict"] = sharded_state_dict
    adapted: type[Any] = type(f"Adapted{kind.__name__}", (kind,), members)
    return adapted


def _normed(layer: Any, input_: Tensor) -> Tensor:
    """The input of the product: some layers have a norm inside. Its weight is frozen."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return input_
    # The second name is Transformer Engine's.
    is_centered = getattr(layer, "is_zero_centered", getattr(layer, "zero_centered_gamma", False))
    return rms_norm(input_, weight, layer.eps, is_zero_centered=is_centered)
