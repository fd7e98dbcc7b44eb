"""The weights of a Megatron-core model under both names, and the shard of each that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.core import parallel_state

from rlscale.architectures.family import find_family
from rlscale.architectures.tower_shape import PREFIX
from rlscale.architectures.weight_names import TensorLayout, Weight
from rlscale.training.megatron.hf_mapping.sharding import HeadSizes, Shard
from rlscale.training.megatron.model.transformer_config import MegatronArchitecture
from rlscale.training.megatron.model.vision import TOWER

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
OWN_PREFIX = "value_head."
"""Prefix of parameters that Hugging Face does not have."""
STACKED = ".stacked"
"""Suffix of the name of a weight that stacks those of all experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedWeight:
    """A weight of a model with its layer and expert. None: it belongs to no layer or expert."""

    weight: Weight
    layer: int | None = None
    expert: int | None = None
    members: tuple[MappedWeight, ...] = ()  # the weights of all experts of a layer that Hugging Face stacks to this one


def map_weights(architecture: MegatronArchitecture) -> Iterator[MappedWeight]:
    """Every weight in the order of the Hugging Face model, without an output layer that is tied to the embedding."""
    family, config = find_family(architecture.family), architecture.transformer
    names = family.hf_names
    if config.multi_latent_attention and config.q_lora_rank is None:
        names = family.plain_query_names
    assert names is not None, f"{family.name} has no table of weight names"
    frequency, without = config.moe_layer_freq, architecture.architecture.missing_features
    for weight in (*_tower_weights(architecture), *names.before):
        yield MappedWeight(weight=weight)
    for i in range(config.num_layers):
        # An int means that every layer has experts: other steps arrive as a list with one entry per layer.
        has_experts = config.num_moe_experts is not None and (isinstance(frequency, int) or bool(frequency[i]))
        num_experts = int(config.num_moe_experts) if has_experts else 0
        is_linear = i in architecture.architecture.linear_layers
        for weight, expert in names.layer_weights(i, num_experts=num_experts, is_linear=is_linear, without=without):
            yield MappedWeight(weight=weight, layer=i, expert=expert)
    for k in range(config.mtp_num_layers or 0):
        assert family.mtp is not None, "check_architecture refuses families without these layers"
        # They have the kind of the last layer.
        options = {"num_layers": config.num_layers, "num_experts": num_experts, "without": without}
        for weight, expert in family.mtp.layer_weights(names, k, **options):
            yield MappedWeight(weight=weight, layer=config.num_layers + k, expert=expert)
    for weight in names.after:
        if weight.megatron != OUTPUT_LAYER or not architecture.is_tied:
            yield MappedWeight(weight=weight)


def stack_experts(mapped: Iterable[MappedWeight]) -> Iterator[MappedWeight]:
    """The same weights with one for those of all experts that Hugging Face stacks, in the place of the first of them.

    An expert-parallel rank holds consecutive experts, so it holds a shard of the rows of the stacked tensor.
    """
    groups: dict[str, list[MappedWeight]] = {}
    everything = list(mapped)
    for each in everything:
        if each.weight.stacked:
            groups.setdefault(each.weight.hf[0], []).append(each)
    for each in everything:
        if not each.weight.stacked:
            yield each
        elif each.expert == 0:
            (name,) = each.weight.hf
            weight = Weight(megatron=each.weight.megatron + STACKED, hf=(name,), layout=TensorLayout.rows)
            yield MappedWeight(weight=weight, layer=each.layer, members=tuple(groups[name]))


def _tower_weights(architecture: MegatronArchitecture) -> Iterator[Weight]:
    """The weights of the vision tower, if there is one."""
    vision = find_family(architecture.family).vision
    if vision is None:
        return
    (prefix, _), tower = vision.checkpoint_prefixes, architecture.architecture.tower
    assert tower is not None, "load_architecture reads the shape of the tower"
    for known, _ in tower.named_shapes():
        name = known.removeprefix(PREFIX)
        yield Weight(megatron=f"{TOWER}{name}", hf=(f"{prefix}{name}",))


def head_sizes(architecture: MegatronArchitecture) -> HeadSizes:
    """The sizes that tensor layouts depend on."""
    config = architecture.transformer
    return HeadSizes(
        num_groups=config.num_query_groups,
        queries_per_group=config.num_attention_heads // config.num_query_groups,
        vocab_size=architecture.vocab_size,
        padded_vocab_size=architecture.padded_vocab_size,
        delta=architecture.architecture.delta,
    )


def shard_of_rank(mapped: MappedWeight) -> Shard:
    """The shard of a weight that this rank holds. Experts have a separate tensor-parallel group."""
    if mapped.members:
        return Shard(
            index=parallel_state.get_expert_model_parallel_rank(),
            count=parallel_state.get_expert_model_parallel_world_size(),
        )
    if mapped.expert is None:
        return Shard(
            index=parallel_state.get_tensor_model_parallel_rank(),
            count=parallel_state.get_tensor_model_parallel_world_size(),
        )
    return Shard(
        index=parallel_state.get_expert_tensor_parallel_rank(),
        count=parallel_state.get_expert_tensor_parallel_world_size(),
    )
