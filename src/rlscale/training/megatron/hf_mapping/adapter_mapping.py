"""The adapters of a Megatron-core model under both names, and weights with the adapters added to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.architectures.weight_names import TensorLayout, Weight
from rlscale.training.megatron.hf_mapping.mapping import MappedWeight, head_sizes, map_weights
from rlscale.training.megatron.hf_mapping.sharding import hf_from_shards
from rlscale.training.megatron.model.adapted_layers import ADAPTERS, LayerAdapters
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.modules.lora import peft_names


def map_adapters(model: MegatronModel) -> Iterator[MappedWeight]:
    """A and B of every layer of the whole model, in the order of its weights; nothing without adapters."""
    layers = set() if model.adapters is None else set(model.adapters.layers)
    vision = find_family(model.architecture.family).vision
    for mapped in map_weights(model.architecture) if layers else ():
        own, layout = mapped.weight.megatron.removesuffix(".weight"), mapped.weight.layout
        for name in mapped.weight.hf:
            # peft names layers as transformers does in memory.
            layer = (name if vision is None else vision.in_memory(name)).removesuffix(".weight")
            if layer not in layers:
                continue
            layouts = {TensorLayout.columns: (layout, TensorLayout.whole)}.get(
                layout, (TensorLayout.whole, _row_layout(layout, layer))
            )
            for half, hf_name, of_half in zip("ab", peft_names(layer), layouts, strict=True):
                path = f"{own}.{ADAPTERS}.{layer.split('.')[-1]}.{half}"
                yield MappedWeight(weight=Weight(megatron=path, hf=(hf_name,), layout=of_half), layer=mapped.layer)


def _row_layout(layout: TensorLayout, layer: str) -> TensorLayout:
    """The layout of B: it belongs to one projection of a fused layer, whose rows are divided as those of a simple one.

    Only the queries, keys and values of a gated delta net are one tensor of three parts.
    """
    if layout == TensorLayout.delta_parts and layer.endswith(".in_proj_qkv"):
        return TensorLayout.delta_conv
    return TensorLayout.rows if layout in _FUSED else layout


_FUSED = (
    TensorLayout.qkv,
    TensorLayout.qkv_gated,
    TensorLayout.gated,
    TensorLayout.delta_heads,
    TensorLayout.delta_parts,
)


class ModelShards(Mapping[str, Tensor]):
    """The rank's shards of a model's weights by Megatron-core's names, merged with their adapters on request.

    Args:
        model: with or without adapters.
        is_merged: False: without the adapters.
        mapped: weights of which those that stack experts are computed on request.
    """

    def __init__(self, model: MegatronModel, *, is_merged: bool = True, mapped: Sequence[MappedWeight] = ()) -> None:
        self._sizes = head_sizes(model.architecture)
        self._weights = {name: weight.detach() for name, weight in model.named_weights()}
        self._adapters: dict[str, LayerAdapters] = {}
        for name, module in model.named_modules() if is_merged and model.adapters is not None else ():
            if isinstance(module, LayerAdapters):
                self._adapters[f"{name.removesuffix(f'.{ADAPTERS}')}.weight"] = module
        # The experts of this rank, in order.
        own = {
            each.weight.megatron: [m.weight for m in each.members if m.weight.megatron in self._weights]
            for each in mapped
        }
        self._stacked: dict[str, list[Weight]] = {name: members for name, members in own.items() if members}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._stacked:
            return torch.stack([self._expert(member) for member in self._stacked[name]])
        weight, adapters = self._weights[name], self._adapters.get(name)
        return (weight if adapters is None else adapters.merge(weight)).contiguous()

    def _expert(self, weight: Weight) -> Tensor:
        """The weight of an expert as Hugging Face stores it in the stacked tensor."""
        (found,) = hf_from_shards(weight.layout, [self._weights[weight.megatron]], sizes=self._sizes)
        return found.T if found.dim() == 2 else found

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._stacked

    def __len__(self) -> int:
        return len(self._weights) + len(self._stacked)
