"""The weights of a model in both namings, and where its parts lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core import parallel_state

from rlscale.training.megatron.hf_mapping import FAMILIES, deepseek_v3
from rlscale.training.megatron.hf_mapping.mapping import Weight
from rlscale.training.megatron.hf_mapping.sharding import Figures, Part
from rlscale.training.megatron.model.transformer_config import Architecture

OUTPUT_LAYER = "output_layer.weight"
OWN_PREFIX = "value_head."
"""Parameters that Hugging Face does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A weight, and whether it belongs to an expert."""

    weight: Weight
    layer: int | None = None
    expert: int | None = None


def entries_of(architecture: Architecture) -> Iterator[Entry]:
    """Every weight in the order of the Hugging Face model; an output layer that is the embedding does not come."""
    names, config = FAMILIES[architecture.family], architecture.transformer
    if config.multi_latent_attention and config.q_lora_rank is None:
        names = deepseek_v3.WITH_PLAIN_QUERIES
    every = config.moe_layer_freq
    for weight in names.before:
        yield Entry(weight=weight)
    for i in range(config.num_layers):
        has_experts = config.num_moe_experts is not None and (isinstance(every, int) or bool(every[i]))
        num_experts = int(config.num_moe_experts) if has_experts else 0
        for weight, expert in names.layer(i, num_experts=num_experts):
            yield Entry(weight=weight, layer=i, expert=expert)
    for weight in names.after:
        if weight.megatron != OUTPUT_LAYER or not architecture.is_tied:
            yield Entry(weight=weight)


def figures_of_model(architecture: Architecture) -> Figures:
    """What layouts depend on."""
    config = architecture.transformer
    return Figures(
        num_groups=config.num_query_groups,
        heads_of_group=config.num_attention_heads // config.num_query_groups,
        vocab_size=architecture.vocab_size,
        padded_vocab_size=architecture.padded_vocab_size,
    )


def part_of_rank(entry: Entry) -> Part:
    """Which part of a weight this tensor-parallel rank holds; experts have ranks of their own."""
    if entry.expert is None:
        return Part(
            index=parallel_state.get_tensor_model_parallel_rank(),
            count=parallel_state.get_tensor_model_parallel_world_size(),
        )
    return Part(
        index=parallel_state.get_expert_tensor_parallel_rank(),
        count=parallel_state.get_expert_tensor_parallel_world_size(),
    )
