"""Adapters of a Megatron-core model: drawn or loaded as on FSDP2, and sent to engines that hold the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from rlscale.architectures.weight_names import TensorLayout
from rlscale.config import LoraConfig
from rlscale.errors import ConfigError, Problem
from rlscale.models.hf_models import build_causal_lm
from rlscale.training.megatron.hf_mapping.adapter_mapping import map_adapters
from rlscale.training.megatron.hf_mapping.export_hf import Exporter
from rlscale.training.megatron.hf_mapping.mapping import MappedWeight, head_sizes, map_weights, shard_of_rank
from rlscale.training.megatron.hf_mapping.sharding import SliceReader, shard_from_hf
from rlscale.training.megatron.model.adapted_layers import (
    ADAPTERS,
    AdapterSettings,
    LayerAdapters,
    Projections,
    adapt_layer,
)
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.megatron.model.vision import TOWER, mark_copies
from rlscale.training.modules import lora as peft_adapters
from rlscale.training.modules.lora import find_adapters, peft_names
from rlscale.training.offload import Offloader


@torch.no_grad()
def add_adapters(model: MegatronModel, path: str, lora: LoraConfig, *, seed: int) -> MegatronModel:
    """Adds this rank's part of the adapters to the linear layers of a model, in place. No collective.

    Args:
        model: with the weights of the base.
        path: Hugging Face folder or hub id of its architecture.
        lora: of rank 1 or more.
        seed: of A, the same on all ranks; B starts at 0.

    Returns: the same model, with the settings of its adapters.

    Raises:
        ConfigError: as peft's `add_adapters`, or several ranks share a key head.
    """
    # The model of transformers without weights: peft finds the layers, draws A and reads `lora.load`, as on FSDP2.
    shell = build_causal_lm(path, dtype=torch.float32, attn_implementation="eager")
    peft_adapters.add_adapters(shell, lora, seed=seed)
    found = {name.removesuffix(".weight"): adapter for name, adapter in find_adapters(shell).items()}
    model = replace(model, adapters=AdapterSettings(rank=lora.rank, alpha=lora.alpha, layers=tuple(found)))
    halves: dict[str, Tensor] = {}
    for layer, adapter in found.items():
        halves |= dict(zip(peft_names(layer), (adapter.a, adapter.b), strict=True))
    mapped = {each.weight.megatron: each for each in map_adapters(model)}
    missing = halves.keys() - {each.weight.hf[0] for each in mapped.values()}
    assert not missing, f"the table of {model.architecture.family} has no layer of {sorted(missing)[0]}"
    # By the layer that holds them: <layer>.adapters.<projection>.<a or b>.
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, each in mapped.items():
        owner, _, half = name.rpartition(f".{ADAPTERS}.")
        by_layer.setdefault(owner, {})[half] = _shard(halves[each.weight.hf[0]], each, model=model)
    fused = {each.weight.megatron.removesuffix(".weight"): each for each in map_weights(model.architecture)}
    for name, module in list(model.named_modules()):
        if name in by_layer:
            adapters = _layer_adapters(module, by_layer[name], fused[name], model=model)
            adapt_layer(module, adapters)
            if name.startswith(TOWER):
                mark_copies(adapters.parameters(), model.config)
    return model


def _shard(full: Tensor, mapped: MappedWeight, *, model: MegatronModel) -> Tensor:
    """The part of A or B that this rank holds."""
    source, sizes = SliceReader.from_tensor(full), head_sizes(model.architecture)
    return shard_from_hf(mapped.weight.layout, [source], shard=shard_of_rank(mapped), sizes=sizes)


def _layer_adapters(
    layer: nn.Module, halves: Mapping[str, Tensor], mapped: MappedWeight, *, model: MegatronModel
) -> LayerAdapters:
    """The adapters of a layer from its halves, by `<projection>.<a or b>`."""
    assert model.adapters is not None, "set by the caller"
    weight = layer.get_parameter("weight")
    # Copies: a slice would keep the whole tensor in memory.
    own = {name: half.to(weight.device, weight.dtype, copy=True).contiguous() for name, half in halves.items()}
    names = dict.fromkeys(name.split(".")[0] for name in own)
    return LayerAdapters(
        {name: (own[f"{name}.a"], own[f"{name}.b"]) for name in names},
        projections=_projections(mapped, len(weight), model=model),
        scale=model.adapters.scale,
        config=model.config,
    )


def _projections(mapped: MappedWeight, num_rows: int, *, model: MegatronModel) -> Projections:
    """The projections in a layer with `num_rows` output features on this rank."""
    sizes, num_ranks = head_sizes(model.architecture), shard_of_rank(mapped).count
    if mapped.weight.layout in (TensorLayout.qkv, TensorLayout.qkv_gated) and sizes.num_groups % num_ranks:
        rule = f"divide the {sizes.num_groups} key heads of the model with train.lora.rank"
        fix = f"set it to {gcd(sizes.num_groups, num_ranks)}, or choose train=fsdp"
        path = "megatron.tensor_model_parallel_size"
        raise ConfigError([Problem(path=path, rule=rule, value=str(num_ranks), fix=fix)])
    is_delta = mapped.weight.layout in (TensorLayout.delta_heads, TensorLayout.delta_parts)
    assert sizes.delta is not None or not is_delta, "the model has gated delta nets"
    num_groups = sizes.delta.key_heads if sizes.delta is not None and is_delta else sizes.num_groups
    return Projections.from_layer(
        mapped.weight.layout,
        [name.split(".")[-2] for name in mapped.weight.hf],
        num_rows=num_rows,
        num_groups=num_groups // num_ranks,
        queries_per_group=sizes.queries_per_group,
        parts=() if sizes.delta is None else tuple(part // num_ranks for part in sizes.delta.parts),
    )


class MegatronAdapters:
    """See `AdapterExporter`. The constructor is a collective of all ranks."""

    def __init__(self, model: MegatronModel, *, exporter: Exporter, offloader: Offloader) -> None:
        assert model.adapters is not None, "a model with adapters"
        self.config: Mapping[str, Any] = model.adapters.peft_config
        self._base, self._offloader = exporter, offloader
        self._exporter = Exporter(model, mapped=list(map_adapters(model)))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See AdapterExporter; on rank 0 only."""
        with self._offloader.resident("policy"):
            yield from self._exporter.weights()

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See AdapterExporter."""
        with self._offloader.resident("policy"):
            yield from self._base.base_weights()
