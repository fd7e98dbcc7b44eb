"""Ranks of every process group of a layout, and the shards of the weights that each rank holds, without processes.

The order of ranks is that of `training/megatron/parallel_dims.py`: tensor, context, data, pipeline for dense layers,
and tensor, expert, data, pipeline for experts. With FSDP2, context is the inner axis and data the outer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family
from rlscale.architectures.weight_names import TensorLayout, Weight
from rlscale.rehearsal.cut_layout import LayoutSizes

Groups = list[list[int]]


def rank_groups(sizes: LayoutSizes) -> dict[str, Groups]:
    """Name of an axis -> its groups of global ranks. The groups of an axis contain every rank once."""
    dense = {"tensor": sizes.tensor, "context": sizes.context, "data": sizes.data, "pipeline": sizes.pipeline}
    groups = _split(dense)
    if sizes.expert * sizes.expert_tensor == 1:
        return groups
    within, across = sizes.expert_tensor, sizes.expert
    copies = sizes.ranks // (within * across * sizes.pipeline)
    experts = {"expert_tensor": within, "expert": across, "expert_data": copies, "pipeline": sizes.pipeline}
    return groups | {name: found for name, found in _split(experts).items() if name != "pipeline"}


def _split(axes: Mapping[str, int]) -> dict[str, Groups]:
    """Groups of each axis; the first axis has adjacent ranks."""
    total, stride, found = math.prod(axes.values()), 1, {}
    for name, size in axes.items():
        # Ranks of a group differ in this axis alone: they start at every rank whose own index there is 0.
        starts = [rank for rank in range(total) if rank // stride % size == 0]
        found[name] = [[start + i * stride for i in range(size)] for start in starts]
        stride *= size
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWeight:
    """A weight of the Megatron-core model."""

    weight: Weight
    stage: int
    expert: int | None
    num_shards: int
    num_elements: int


def planned_weights(a: Architecture, sizes: LayoutSizes, *, stages: Sequence[int]) -> Iterator[PlannedWeight]:
    """Every weight of a model of a family that Megatron-core trains.

    Args:
        a: architecture of the model.
        sizes: parallel sizes.
        stages: pipeline stage of each layer.
    """
    family = find_family(a.model_type)
    names = family.plain_query_names if a.is_latent and not a.q_rank else family.hf_names
    assert names is not None, f"{family.name} has no table of weight names"
    for weight in names.before:
        yield _planned(a, sizes, weight, stage=0)
    for layer, stage in enumerate(stages):
        num_experts = a.num_experts if a.has_experts(layer) else 0
        is_linear = layer in a.linear_layers
        weights = names.layer_weights(layer, num_experts=num_experts, is_linear=is_linear, without=a.missing_features)
        for weight, expert in weights:
            yield _planned(a, sizes, weight, stage=stage, expert=expert)
    for weight in names.after:
        if weight.megatron != "output_layer.weight" or not a.tied:
            yield _planned(a, sizes, weight, stage=sizes.pipeline - 1)


def _planned(
    a: Architecture, sizes: LayoutSizes, weight: Weight, *, stage: int, expert: int | None = None
) -> PlannedWeight:
    parts = sizes.tensor if expert is None else sizes.expert_tensor
    return PlannedWeight(
        weight=weight,
        stage=stage,
        expert=expert,
        num_shards=1 if weight.layout == TensorLayout.whole else parts,
        num_elements=sum(count_hf_elements(a, name) for name in weight.hf),
    )


def sharded_weights(a: Architecture) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every weight of transformers' model, of which FSDP2 divides the rows, and (rows, columns).

    transformers keeps all experts of a layer in two tensors whose rows are experts.
    """
    sizes, experts = LayoutSizes(nodes=1, gpus=1, gpus_per_node=1), dict[str, int]()
    for each in planned_weights(a, sizes, stages=[0] * a.num_layers):
        if each.expert is None:
            yield from ((name, hf_shape(a, name)) for name in each.weight.hf)
            continue
        name = each.weight.hf[0].replace(f".experts.{each.expert}.", ".experts.").removesuffix(".weight")
        experts[name.replace("gate_proj", "gate_up_proj")] = each.num_elements
    for name, num_elements in experts.items():
        yield name, (a.num_experts, num_elements)


def held_shards(sizes: LayoutSizes, weights: list[PlannedWeight], *, num_experts: int) -> list[dict[str, int]]:
    """For each rank the weights that it holds: Megatron-core's name -> index of the shard."""
    held: list[dict[str, int]] = []
    per_rank = num_experts // sizes.expert if num_experts else 0
    by_place: dict[tuple[int, int | None], list[PlannedWeight]] = {}
    for each in weights:
        # Experts are divided in order: each expert-parallel rank has consecutive ones.
        share = None if each.expert is None else each.expert // per_rank
        by_place.setdefault((each.stage, share), []).append(each)
    per_stage = sizes.ranks // sizes.pipeline
    for rank in range(sizes.ranks):
        stage, inner = divmod(rank, per_stage)
        expert_rank = inner // sizes.expert_tensor % sizes.expert
        own: dict[str, int] = {}
        for share, index in ((None, inner % sizes.tensor), (expert_rank, inner % sizes.expert_tensor)):
            for each in by_place.get((stage, share), ()):
                own[each.weight.megatron] = index if each.num_shards > 1 else 0
        held.append(own)
    return held


def count_hf_elements(a: Architecture, name: str) -> int:
    """Elements of a tensor of the Hugging Face checkpoint of a model."""
    return math.prod(hf_shape(a, name))


def hf_shape(a: Architecture, name: str) -> tuple[int, int]:
    """Rows and columns of a tensor of the Hugging Face checkpoint of a model; a vector has one column.

    Of a tensor that stacks all experts those of one of them.
    """
    hidden, (kind, last) = a.hidden_size, name.split(".")[-2:]
    if kind == "experts":
        kind = last.removesuffix("_bias")
    if last == "sinks":
        return a.num_heads, 1
    width = a.expert_size if ".experts." in name else a.intermediate_size
    if ".linear_attn." in name and a.delta is not None:
        own = dict(a.delta.named_shapes(hidden, by_head=a.has_delta_by_head))[name.split(".linear_attn.")[1]]
        return own[0], math.prod(own[1:])
    if name.endswith("shared_expert_gate.weight"):
        return 1, hidden
    if ".shared_expert" in name:
        width = a.shared_size
    rows, columns = {
        "embed_tokens": (a.vocab_size, hidden),
        "lm_head": (a.vocab_size, hidden),
        "q_proj": (a.num_heads * a.query_width * (2 if a.delta else 1), hidden),
        "k_proj": (a.num_kv_heads * a.head_dim, hidden),
        "v_proj": (a.num_kv_heads * a.head_dim, hidden),
        "o_proj": (hidden, a.num_heads * a.value_width),
        "q_norm": (a.qk_norm_widths[0], 1),
        "k_norm": (a.qk_norm_widths[1], 1),
        "q_a_proj": (a.q_rank, hidden),
        "q_a_layernorm": (a.q_rank, 1),
        "q_b_proj": (a.num_heads * a.query_width, a.q_rank),
        "kv_a_proj_with_mqa": (a.kv_rank + a.rope_dim, hidden),
        "kv_a_layernorm": (a.kv_rank, 1),
        "kv_b_proj": (a.num_heads * (a.nope_dim + a.value_dim), a.kv_rank),
        "gate": (a.num_experts, hidden),
        "router": (a.num_experts, hidden),
        "gate_up_proj": (2 * width, hidden),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        # Gate, down and up projection of an expert of MiniMax-M2.
        "w1": (width, hidden),
        "w2": (hidden, width),
        "w3": (width, hidden),
    }.get(kind, (hidden, 1))  # every other weight is a norm over the hidden width
    if name.endswith("e_score_correction_bias"):
        return a.num_experts, 1
    return (rows, 1) if last == "bias" or last.endswith("_bias") else (rows, columns)
