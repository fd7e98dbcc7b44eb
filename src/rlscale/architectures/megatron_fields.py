"""What a checkpoint's `config.json` says of the fields of Megatron-core's TransformerConfig, and whether keys agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlscale.architectures.hf_config import figures_of
from rlscale.architectures.mla_fields import LATENT_FAMILIES, latent_fields, latent_problems
from rlscale.config.errors import show
from rlscale.config.groups.megatron import MegatronConfig, RopeType
from rlscale.config.groups.model import MegatronToHf, ModelConfig
from rlscale.errors import Problem

FAMILIES = ("qwen3", "qwen2", "llama", "glm4", "qwen3_moe", *LATENT_FAMILIES)
"""Values of `model_type` whose weights are converted for Megatron-core."""

BRIDGED = ("qwen3", "qwen2", "llama", "qwen3_moe")
"""Those of them that mbridge converts, too."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ELSEWHERE = "train it with train=fsdp"

ASSUMED: Mapping[str, Any] = MappingProxyType(
    {
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_shared_expert_intermediate_size": None,
        "multi_latent_attention": False,
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    }
)
"""Fields that describe an architecture without a key of their own, and what Megatron-core takes where none is given."""


def megatron_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ASSUMED` as a model of this config has them; those of experts only where it has some.

    Args:
        config_json: of a family in `FAMILIES`.
    """
    figures = figures_of(config_json)
    fields = {
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config_json.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": bool(figures.get("attention_bias", False)),
        "qk_layernorm": bool(figures.get("use_qk_norm", False)),
        "rotary_interleaved": figures.get("model_type") == "glm4",
        # Logprobs before and after a step must be those of one function of the tokens.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if is_latent(config_json):
        return fields | latent_fields(config_json)
    if not figures.get("num_experts"):
        return fields
    return fields | {
        "moe_layer_freq": _layers_with_experts(config_json, int(figures["num_layers"])),
        # The softmax over the chosen experts is that over all of them, made to sum to one.
        "moe_router_pre_softmax": not figures.get("norm_topk_prob", False),
        "moe_router_score_function": "softmax",
        "moe_shared_expert_intermediate_size": None,
    }


def is_latent(config_json: Mapping[str, Any]) -> bool:
    """Whether a model of this config has latent attention."""
    return config_json.get("model_type") in LATENT_FAMILIES


def architecture_problems(
    config_json: Mapping[str, Any], *, model: ModelConfig, megatron: MegatronConfig
) -> list[Problem]:
    """All that Megatron-core cannot compute of a model, and every key that contradicts its `config.json`."""
    family = model.name or str(config_json.get("model_type"))
    if family not in FAMILIES:
        path = "model.name" if model.name is not None else "model.model_type"
        rule = f"be one of {', '.join(FAMILIES)} with train.backend=megatron"
        return [Problem(path=path, rule=rule, value=family, fix=_ELSEWHERE)]
    figures, fields = figures_of(config_json), megatron_fields(config_json)
    problems = _unknown(config_json)
    if is_latent(config_json):
        problems += latent_problems(config_json, fix=_ELSEWHERE)
    for name, found in figures.items():
        given = getattr(model, name)
        if given is not None and given != found:
            problems.append(_contradiction(f"model.{name}", given=given, found=found))
    for name, found in fields.items():
        if name in megatron.core_args and megatron.core_args[name] != found:
            problems.append(_contradiction(f"megatron.{name}", given=megatron.core_args[name], found=found))
    # `rope` is also what stands there where nothing is given, and the model's own config is to count.
    if megatron.rope_type == RopeType.yarn or not model.use_hf_config_for_megatron:
        problems += rope_type_problems(config_json, megatron)
    problems += _positions(config_json, megatron)
    open_fields = {
        name: found for name, found in fields.items() if name not in megatron.core_args and ASSUMED[name] != found
    }
    problems += _bridge(family, fields, model)
    if open_fields and not model.use_hf_config_for_megatron:
        words = " ".join(f"megatron.{name}={show(found)}" for name, found in open_fields.items())
        rule = "be true where megatron leaves open in what the model differs from Megatron-core's defaults"
        path = "model.use_hf_config_for_megatron"
        problems.append(Problem(path=path, rule=rule, value="false", fix=f"set it to true, or add {words}"))
    return problems


def rope_type_problems(config_json: Mapping[str, Any], megatron: MegatronConfig) -> list[Problem]:
    """Whether `megatron.rope_type`, where it is given, is what the model's positions are."""
    found = rope_type_of(config_json)
    if megatron.rope_type == found:
        return []
    contradiction = _contradiction("megatron.rope_type", given=megatron.rope_type, found=found)
    return [replace(contradiction, fix=f"set it to {found}")]


def rope_type_of(config_json: Mapping[str, Any]) -> RopeType:
    """What `megatron.rope_type` is for a model of this config."""
    return RopeType.yarn if _rope(config_json)["rope_type"] == "yarn" else RopeType.rope


def _bridge(family: str, fields: Mapping[str, Any], model: ModelConfig) -> list[Problem]:
    """mbridge has no maps for GLM-4, nor for dense layers among those with experts."""
    if model.megatron_to_hf_mode != MegatronToHf.bridge:
        return []
    is_mixed = isinstance(fields.get("moe_layer_freq"), list)
    if family in BRIDGED and not is_mixed:
        return []
    what = "dense layers among those with experts" if is_mixed else f"a {family} model"
    rule = f"be raw for {what}; mbridge has maps for {', '.join(BRIDGED)}"
    return [Problem(path="model.megatron_to_hf_mode", rule=rule, value="bridge", fix="leave it out")]


def _positions(config_json: Mapping[str, Any], megatron: MegatronConfig) -> list[Problem]:
    """`megatron.max_position_embeddings` may also be the length that YaRN started from."""
    given, found = megatron.max_position_embeddings, config_json.get("max_position_embeddings")
    if given is None or found is None or given in (found, _rope(config_json).get("original_max_position_embeddings")):
        return []
    return [_contradiction("megatron.max_position_embeddings", given=given, found=found)]


def _contradiction(path: str, *, given: object, found: object) -> Problem:
    return Problem(path=path, rule=f"be {show(found)}, as config.json says", value=show(given), fix="leave it out")


def _unknown(config_json: Mapping[str, Any]) -> list[Problem]:
    """What the layers for Megatron-core do not have."""
    problems = []
    rope = _rope(config_json)["rope_type"]
    wanted = {
        "hidden_act": (config_json.get("hidden_act", "silu"), ("silu",)),
        "rope_type": (rope, _ROPE_TYPES),
        "use_sliding_window": (bool(config_json.get("use_sliding_window", False)), (False,)),
        "mlp_bias": (bool(config_json.get("mlp_bias", False)), (False,)),
    }
    for name, (value, known) in wanted.items():
        if value not in known:
            rule = f"have {name}={' or '.join(show(each) for each in known)} in its config.json with Megatron-core"
            problems.append(Problem(path="model.hf_checkpoint", rule=rule, value=show(value), fix=_ELSEWHERE))
    scale = _rope(config_json).get("attention_factor")
    if rope == "yarn" and scale is not None and float(scale) < 1:
        rule = "have no attention_factor below 1 in its rope_parameters with Megatron-core"
        problems.append(Problem(path="model.hf_checkpoint", rule=rule, value=show(scale), fix=_ELSEWHERE))
    return problems


def _rope(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters`; older files have `rope_scaling`, whose kind some name `type`."""
    rope = dict(config_json.get("rope_parameters") or config_json.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _layers_with_experts(config_json: Mapping[str, Any], num_layers: int) -> int | list[int]:
    """1 where every layer has experts; else 1 or 0 for each layer."""
    dense, every = set(config_json.get("mlp_only_layers") or ()), int(config_json.get("decoder_sparse_step", 1))
    found = [int(i not in dense and (i + 1) % every == 0) for i in range(num_layers)]
    return 1 if all(found) else found
