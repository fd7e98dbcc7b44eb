"""A `config.json` of a tiny model that has the structure of another model: same family, attention, experts and tying.

Its sizes are the smallest that the parallel sizes divide. Widths are not those of the model; everything that decides
which tensors exist, on which ranks, and how they are sharded is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.rehearsal.cut_layout import LayoutSizes

HEAD_DIM = 16
MIN_WIDTH = 64
MIN_POSITIONS = 2048
"""A token is a byte, so that prompts are longer than with the tokenizer of the model."""

LATENT_FIELDS = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
INITIALIZER_RANGE = 0.05
"""Standard deviation of the random weights. With the usual 0.02 all logits of so narrow a model are nearly equal."""

DECODERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Families with a vision tower that is not loaded -> the family of their decoder."""

EXPERT_COUNT_NAMES = {
    "deepseek_v3": "n_routed_experts",
    "kimi_k2": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "glm4_moe_lite": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "minimax_m2": "num_local_experts",
    "mixtral": "num_local_experts",
}
"""Family -> the name of its number of experts in `config.json`. All others have `num_experts`."""

WITHOUT_EXPERT_WIDTH = ("gpt_oss", "minimax_m2", "mixtral")
"""Families whose experts have the width `intermediate_size`; all others have `moe_intermediate_size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """Fields of Megatron-core that decide how layers are distributed over pipeline stages."""

    virtual: int = 1  # chunks of the model on each rank
    first: int | None = None  # layers of the first stage, where they differ from those of the others
    last: int | None = None
    with_embedding: bool = False  # the embedding counts as a layer
    with_loss: bool = False

    @classmethod
    def from_core_args(cls, core_args: Mapping[str, Any]) -> StageShape:
        """The fields in `megatron.core_args`."""
        return cls(
            virtual=int(core_args.get("virtual_pipeline_model_parallel_size") or 1),
            first=core_args.get("num_layers_in_first_pipeline_stage"),
            last=core_args.get("num_layers_in_last_pipeline_stage"),
            with_embedding=bool(core_args.get("account_for_embedding_in_pipeline_split")),
            with_loss=bool(core_args.get("account_for_loss_in_pipeline_split")),
        )

    def count_layers(self, stages: int) -> int:
        """Layers of the tiny model: at least two; 1 in an uneven stage and 2 in the others."""
        if stages > 1 and (self.first is not None or self.last is not None):
            uneven = (self.first is not None) + (self.last is not None)
            return uneven + 2 * (stages - uneven) * self.virtual
        chunks = stages * self.virtual
        extra = self.with_embedding + self.with_loss
        # The counted extras take the place of layers, and every chunk keeps a layer.
        per_chunk = max(2 if extra else 1, -(-2 // chunks))
        return chunks * per_chunk - extra

    def stages_of_layers(self, num_layers: int, stages: int) -> list[int]:
        """The pipeline stage of each layer of a model."""
        if self.first is not None or self.last is not None:
            uneven = {0: self.first, stages - 1: self.last}
            given = {stage: number for stage, number in uneven.items() if number is not None}
            share = (num_layers - sum(given.values())) // max(1, stages - len(given))
            return [stage for stage in range(stages) for _ in range(given.get(stage, share))]
        extra = self.with_embedding + self.with_loss
        per_chunk = (num_layers + extra) // (stages * self.virtual)
        # Chunk i belongs to stage i modulo the number of stages; the embedding counts as the first layer.
        return [(i + self.with_embedding) // per_chunk % stages for i in range(num_layers)]


def tiny_config_json(
    fields: Mapping[str, Any],
    sizes: LayoutSizes,
    *,
    vocab_size: int,
    stages: StageShape | None = None,
    num_mtp: int = 0,
) -> dict[str, Any]:
    """The content of the `config.json` of the tiny model.

    Args:
        fields: architecture of the model, by key of the group `model`.
        sizes: parallel sizes of the rehearsal.
        vocab_size: of the tokenizer. Megatron-core pads it to a multiple of the tensor-parallel size.
        stages: uneven pipeline stages. None: all have the same number of layers.
        num_mtp: layers for multi-token prediction that are trained or kept.
    """
    family = find_family(fields.get("model_type"))
    heads, kv_heads = _count_heads(fields, sizes.tensor)
    is_latent = bool(fields.get("kv_lora_rank"))
    found = {
        "model_type": DECODERS.get(family.name, family.name),
        "num_hidden_layers": _count_layers(fields, sizes.pipeline, stages or StageShape()),
        # A multiple of the heads also where the family has no separate head width.
        "hidden_size": max(MIN_WIDTH, heads * HEAD_DIM),
        "intermediate_size": _multiple(128, sizes.tensor),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if is_latent else kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max(MIN_POSITIONS, int(fields.get("max_position_embeddings") or 0)),
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields.get("rotary_base") or 10_000)},
        "initializer_range": INITIALIZER_RANGE,
        "hidden_act": "silu",
    }
    if not is_latent:
        found["head_dim"] = HEAD_DIM
    if family.mtp is not None:
        found["num_nextn_predict_layers"] = num_mtp
    for name in ("attention_bias", "use_qk_norm"):
        # Families whose code fixes the value have no such field.
        if fields.get(name) is not None and name not in family.implied:
            found[name] = bool(fields[name])
    if is_latent:
        found |= LATENT_FIELDS | {"q_lora_rank": 32 if fields.get("q_lora_rank") else None}
    if family.delta_net:
        found |= _delta_fields(sizes)
    return found | (_expert_fields(fields, family.name, sizes) if fields.get("num_experts") else {})


def _delta_fields(sizes: LayoutSizes) -> dict[str, Any]:
    """Linear attention in every other layer, with key heads that the ranks divide."""
    heads = _multiple(2, sizes.tensor)
    widths = {"linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM}
    return widths | {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "full_attention_interval": 2,
    }


def _count_layers(fields: Mapping[str, Any], pipeline: int, stages: StageShape) -> int:
    layers = stages.count_layers(pipeline)
    # A model with dense and expert layers keeps one of each kind.
    needs = 2 if fields.get("num_experts") and _has_dense_layers(fields) else 1
    assert layers >= needs, "a tiny model has at least two layers"
    return layers


def _count_heads(fields: Mapping[str, Any], tensor: int) -> tuple[int, int]:
    """Query heads and key heads: grouped where the model groups them, copied to several ranks where it does that."""
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    fewest = min(kv_heads, max(tensor, 2))
    # Ranks divide the key heads, or are a multiple of them.
    tiny_kv = fewest if fewest % tensor == 0 or tensor % fewest == 0 else tensor
    group = 2 if heads > kv_heads else 1
    return _multiple(tiny_kv * group, tensor), tiny_kv


def _expert_fields(fields: Mapping[str, Any], family: str, sizes: LayoutSizes) -> dict[str, Any]:
    groups = int(fields.get("n_group") or 1)
    tiny_groups = 2 if groups > 1 else 1
    # Two experts of each chosen group for a token, which is what Megatron-core's group scores assume.
    chosen = min(int(fields.get("num_experts_per_tok") or 1), 2)
    number = _multiple(max(2 * sizes.expert, 4), tiny_groups)
    found: dict[str, Any] = {
        EXPERT_COUNT_NAMES.get(family, "num_experts"): number,
        "num_experts_per_tok": chosen,
    }
    if family in WITHOUT_EXPERT_WIDTH:
        found["intermediate_size"] = _multiple(32, math.lcm(sizes.tensor, sizes.expert_tensor))
    else:
        found["moe_intermediate_size"] = _multiple(32, sizes.expert_tensor)
    if fields.get("norm_topk_prob") is not None:
        found["norm_topk_prob"] = bool(fields["norm_topk_prob"])
    if fields.get("gated_shared_size"):
        found["shared_expert_intermediate_size"] = _multiple(32, sizes.tensor)
    elif fields.get("num_shared_experts") is not None and family not in ("qwen3_moe", "mixtral"):
        found["n_shared_experts"] = min(int(fields["num_shared_experts"]), 1)
    if family == "qwen3_moe" and _has_dense_layers(fields):
        found["mlp_only_layers"] = [0]
    if fields.get("first_k_dense_replace") is not None and family != "qwen3_moe":
        found["first_k_dense_replace"] = min(int(fields["first_k_dense_replace"]), 1)
    if fields.get("n_group") is not None:
        limited = int(fields.get("topk_group") or groups) < groups
        found |= {"n_group": tiny_groups, "topk_group": 1 if limited else tiny_groups}
    if fields.get("routed_scaling_factor") is not None:
        found["routed_scaling_factor"] = float(fields["routed_scaling_factor"])
    return found


def _has_dense_layers(fields: Mapping[str, Any]) -> bool:
    """Whether a model with experts has layers without them."""
    return bool(fields.get("first_k_dense_replace") or fields.get("dense_layers"))


def _multiple(least: int, of: int) -> int:
    """The smallest multiple of both numbers."""
    return math.lcm(least, of)
