"""TransformerConfig fields of models that choose experts by sigmoid scores with a bias, as DeepSeek-V3 does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import hf_fields
from rlscale.errors import Problem, show

_EXPERTS_PER_GROUP_SCORE = 2
"""A group's score is the sum of the scores of its two best experts."""


def sigmoid_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which such a model differs from one with a softmax over experts."""
    fields = hf_fields(config_json)
    num_groups, num_chosen = int(fields.get("n_group") or 1), int(fields.get("topk_group") or 1)
    is_limited = num_chosen < num_groups
    num_layers, num_dense = int(fields["num_layers"]), int(fields.get("first_k_dense_replace", 0))
    return {
        "moe_layer_freq": [int(i >= num_dense) for i in range(num_layers)] if num_dense else 1,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": num_groups if is_limited else None,
        "moe_router_group_topk": num_chosen if is_limited else None,
        "moe_router_topk_scaling_factor": float(fields.get("routed_scaling_factor", 1.0)),
        "moe_shared_expert_intermediate_size": int(fields["moe_intermediate_size"])
        * int(fields.get("num_shared_experts", 1))
        or None,
    }


def check_sigmoid(config_json: Mapping[str, Any], *, fix: str) -> list[Problem]:
    """Reports fields of such a model that Megatron-core computes in another way, or does not have.

    Args:
        config_json: of a family with `sigmoid_experts`.
        fix: what to do instead.
    """
    fields = hf_fields(config_json)
    supported = {
        "norm_topk_prob": (bool(fields.get("norm_topk_prob", True)), (True,)),
        "scoring_func": (config_json.get("scoring_func", "sigmoid"), ("sigmoid",)),
        "topk_method": (config_json.get("topk_method", "noaux_tc"), ("noaux_tc",)),
        "moe_layer_freq": (config_json.get("moe_layer_freq", 1), (1,)),
    }
    problems = check_supported_fields(supported, fix=fix)
    kinds = list(config_json.get("mlp_layer_types") or ())
    if kinds != sorted(kinds):
        rule = (
            "have all dense layers before those with experts in mlp_layer_types of its config.json with Megatron-core"
        )
        problems.append(_problem(rule, show(kinds), fix))
    problems += _check_experts(fields, implied=find_family(config_json.get("model_type")).implied, fix=fix)
    return [*problems, *check_quantization(config_json)]


def check_quantization(config_json: Mapping[str, Any]) -> list[Problem]:
    """Reports weights of 4 or 8 bits, which are not dequantised here."""
    if not config_json.get("quantization_config"):
        return []
    method = dict(config_json["quantization_config"]).get("quant_method")
    rule = "have no quantization_config in its config.json with Megatron-core"
    return [_problem(rule, show(method), "use a copy with bfloat16 weights and without that entry")]


def check_supported_fields(supported: Mapping[str, tuple[Any, tuple[Any, ...]]], *, fix: str) -> list[Problem]:
    """Reports fields of a `config.json` with a value that the layers for Megatron-core do not have.

    Args:
        supported: field -> its value, and the supported ones.
        fix: what to do instead.
    """
    return [
        _problem(f"have {name}={show(known[0])} in its config.json with Megatron-core", show(value), fix)
        for name, (value, known) in supported.items()
        if value not in known
    ]


def _check_experts(fields: Mapping[str, Any], *, implied: Mapping[str, Any], fix: str) -> list[Problem]:
    minimum = {"num_experts_per_tok": 2}
    found = {"num_experts_per_tok": int(fields.get("num_experts_per_tok") or 0)}
    if "num_shared_experts" not in implied:
        minimum["n_shared_experts"] = 1
        found["n_shared_experts"] = int(fields.get("num_shared_experts", 1))
    problems = [
        _problem(f"have {name} of at least {limit} in its config.json with Megatron-core", str(found[name]), fix)
        for name, limit in minimum.items()
        if found[name] < limit
    ]
    num_groups, num_chosen = int(fields.get("n_group") or 1), int(fields.get("topk_group") or 1)
    # Megatron-core scores a group by its best num_experts_per_tok / topk_group experts; the model always by two.
    per_group = int(fields.get("num_experts_per_tok") or 1) // num_chosen
    if num_chosen < num_groups and per_group != _EXPERTS_PER_GROUP_SCORE:
        rule = f"choose {_EXPERTS_PER_GROUP_SCORE} experts from each of topk_group={num_chosen} groups, "
        rule += f"num_experts_per_tok={_EXPERTS_PER_GROUP_SCORE * num_chosen}, with Megatron-core"
        problems.append(_problem(rule, str(per_group * num_chosen), fix))
    return problems


def _problem(rule: str, value: str, fix: str) -> Problem:
    return Problem(path="model.hf_checkpoint", rule=rule, value=value, fix=fix)
