"""What a `config.json` with multi-head latent attention, as of DeepSeek-V3, says of Megatron-core's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.architectures.hf_config import figures_of
from rlscale.config.errors import show
from rlscale.errors import Problem

LATENT_FAMILIES = ("deepseek_v3", "kimi_k2")
"""Values of `model_type` with latent attention and experts that are chosen by sigmoid scores and a bias."""

_GROUP_SCORES = 2
"""Of the best experts of a group whose scores add up to that of the group."""


def latent_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which such a model differs from one with plain attention and a softmax over experts."""
    figures = figures_of(config_json)
    groups, chosen = int(figures.get("n_group") or 1), int(figures.get("topk_group") or 1)
    is_limited = chosen < groups
    layers, dense = int(figures["num_layers"]), int(figures.get("first_k_dense_replace", 0))
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latents
        "rotary_interleaved": False,  # Megatron-core's latent attention always pairs neighbours
        "moe_layer_freq": [int(i >= dense) for i in range(layers)] if dense else 1,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if is_limited else None,
        "moe_router_group_topk": chosen if is_limited else None,
        "moe_router_topk_scaling_factor": float(figures.get("routed_scaling_factor", 1.0)),
        "moe_shared_expert_intermediate_size": int(figures["moe_intermediate_size"])
        * int(figures.get("num_shared_experts", 1)),
    }


def latent_problems(config_json: Mapping[str, Any], *, fix: str) -> list[Problem]:
    """What of such a model Megatron-core does not compute as the model does.

    Args:
        config_json: of a family in `LATENT_FAMILIES`.
        fix: what to do instead.
    """
    figures = figures_of(config_json)
    groups, chosen = int(figures.get("n_group") or 1), int(figures.get("topk_group") or 1)
    per_group = int(figures.get("num_experts_per_tok") or 1) // chosen
    wanted = {
        "rope_interleave": (config_json.get("rope_interleave", True), (True, None)),
        "attention_bias": (bool(config_json.get("attention_bias", False)), (False,)),
        "norm_topk_prob": (bool(figures.get("norm_topk_prob", True)), (True,)),
        "scoring_func": (config_json.get("scoring_func", "sigmoid"), ("sigmoid",)),
        "topk_method": (config_json.get("topk_method", "noaux_tc"), ("noaux_tc",)),
        "moe_layer_freq": (config_json.get("moe_layer_freq", 1), (1,)),
    }
    problems = [
        _problem(f"have {name}={show(known[0])} in its config.json with Megatron-core", show(value), fix)
        for name, (value, known) in wanted.items()
        if value not in known
    ]
    least = {"num_experts_per_tok": 2, "n_shared_experts": 1}
    found = {
        "num_experts_per_tok": int(figures.get("num_experts_per_tok") or 0),
        "n_shared_experts": int(figures.get("num_shared_experts", 1)),
    }
    problems += [
        _problem(f"have {name} of at least {limit} in its config.json with Megatron-core", str(found[name]), fix)
        for name, limit in least.items()
        if found[name] < limit
    ]
    if chosen < groups and per_group != _GROUP_SCORES:
        rule = f"choose {_GROUP_SCORES} experts from each of topk_group={chosen} groups, num_experts_per_tok="
        problems.append(_problem(f"{rule}{_GROUP_SCORES * chosen}, with Megatron-core", str(per_group * chosen), fix))
    if config_json.get("quantization_config"):
        kind = dict(config_json["quantization_config"]).get("quant_method")
        rule = "have no quantization_config in its config.json with Megatron-core"
        to_do = "take a copy whose weights are in bfloat16, without that entry"
        problems.append(_problem(rule, show(kind), to_do))
    return problems


def _problem(rule: str, value: str, fix: str) -> Problem:
    return Problem(path="model.hf_checkpoint", rule=rule, value=value, fix=fix)
