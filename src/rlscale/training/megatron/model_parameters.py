"""The parameters of a Megatron-core model as Hugging Face knows them: their kinds, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlscale.architectures.family import find_family
from rlscale.config import TrainConfig
from rlscale.models.parameter_names import in_memory
from rlscale.training.megatron.hf_mapping.adapter_mapping import map_adapters
from rlscale.training.megatron.hf_mapping.mapping import (
    EMBEDDING,
    OUTPUT_LAYER,
    OWN_PREFIX,
    MappedWeight,
    map_weights,
)
from rlscale.training.megatron.model.adapted_layers import find_layer_adapters
from rlscale.training.megatron.model.megatron_model import MTP, MegatronModel
from rlscale.training.modules.freeze import trained_names


def mapped_parameters(model: MegatronModel) -> Iterator[tuple[str, nn.Parameter, MappedWeight | None]]:
    """The rank's parameters with their names and weights; None for a value head, which Hugging Face does not have."""
    by_name = {mapped.weight.megatron: mapped for mapped in (*map_weights(model.architecture), *map_adapters(model))}
    if model.architecture.is_tied:
        # The last pipeline stage holds a copy of the embedding as its output layer.
        by_name[OUTPUT_LAYER] = by_name[EMBEDDING]
    for name, parameter in model.named_parameters():
        yield name, parameter, None if name.startswith(OWN_PREFIX) else by_name[name]


def parameter_kinds(model: MegatronModel) -> Mapping[Tensor, str]:
    """Parameter -> kind, a key of `lr_scales`; the kinds are those on FSDP2."""
    return {p: _kind(name, p, is_tied=model.architecture.is_tied) for name, p, _ in mapped_parameters(model)}


def _kind(name: str, parameter: nn.Parameter, *, is_tied: bool) -> str:
    if name in (EMBEDDING, OUTPUT_LAYER) and is_tied:
        return "tied"
    if name == EMBEDDING:
        return "embedding"
    if name == OUTPUT_LAYER or name.startswith(OWN_PREFIX):
        return "unembedding"
    # The kernel of a convolution over tokens has one number for each position and channel.
    return "matrix" if parameter.dim() >= 2 and not name.endswith("conv1d.weight") else "other"


def freeze_model(model: MegatronModel, train: TrainConfig) -> None:
    """Freezes the parameters that are not trained, by their names in transformers; a collective of all ranks.

    Of a model with adapters only these are trained. The value head of a critic is always trained.

    Raises:
        ConfigError: as `trained_names`, on every rank.
    """
    if model.adapters is not None:
        adapters = {p for each in find_layer_adapters(model.chunks) for p in each.parameters()}
        for _, parameter in model.named_parameters():
            parameter.requires_grad_(parameter in adapters)
        _keep_gradients_of_recomputed_layers(model)
        return
    if train.only_train_params is None and train.freeze_params is None:
        return
    own = {name: _transformers_names(name, mapped, model=model) for name, _, mapped in mapped_parameters(model)}
    # Each rank has the parameters of its stage and experts; a pattern may match those of other ranks only.
    gathered: list[dict[str, list[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    groups = {name: group for rank in gathered for name, group in rank.items()}
    everything = list(dict.fromkeys(name for group in groups.values() for name in group))
    trained = trained_names(everything, train, merged=groups.values())
    for name, parameter in model.named_parameters():
        # A value head starts at 0: frozen, it would give every value 0 and the layers below no gradient.
        parameter.requires_grad_(own[name][0] in trained or name.startswith(OWN_PREFIX))
    _keep_gradients_of_recomputed_layers(model)


def freeze_mtp(model: MegatronModel) -> None:
    """Freezes the layers for multi-token prediction unless they are trained; no collective."""
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith(MTP) and not chunk.trains_mtp:
                parameter.requires_grad_(False)


def _keep_gradients_of_recomputed_layers(model: MegatronModel) -> None:
    """Makes the output of a frozen embedding require a gradient.

    Megatron-core's recomputation gives the parameters of a layer no gradient where the layer's input requires none.
    """
    for chunk in model.chunks:
        if chunk.pre_process and model.config.recompute_granularity is not None:
            chunk.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: object, output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _transformers_names(name: str, mapped: MappedWeight | None, *, model: MegatronModel) -> list[str]:
    if mapped is None:
        # transformers keeps the value head in the place of the output layer.
        return [f"lm_head.{name.removeprefix(OWN_PREFIX)}"]
    vision = find_family(model.architecture.family).vision
    return in_memory(mapped.weight.hf, is_tied=model.architecture.is_tied, vision=vision)
