"""Fields of Megatron-core's TransformerConfig from a `config.json`, and a check that config keys agree with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.delta_fields import check_delta, delta_fields
from rlscale.architectures.family import find_family, load_families, names_with
from rlscale.architectures.hf_config import flat_config, hf_fields
from rlscale.architectures.mla_fields import check_mla, mla_fields
from rlscale.architectures.sigmoid_fields import check_sigmoid, sigmoid_fields
from rlscale.architectures.sink_fields import check_sinks, sink_fields
from rlscale.errors import Problem, show

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_USE_FSDP = "train it with train=fsdp"
_WITHOUT_SINKS: Mapping[str, Any] = MappingProxyType(
    {
        "softmax_type": "vanilla",
        "window_size": None,
        "window_attn_skip_freq": None,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
    }
)

MEGATRON_DEFAULTS: Mapping[str, Any] = MappingProxyType(
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
        **_WITHOUT_SINKS,
    }
)
"""TransformerConfig fields that describe an architecture and have no config key, with Megatron-core's defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronKeys:
    """Values of the config groups `model` and `megatron` that must agree with a `config.json`. None: not set."""

    family: str | None = None  # `model.name`
    fields: Mapping[str, Any] = field(default_factory=dict)  # architecture fields, by key of the group `model`
    core_args: Mapping[str, Any] = field(default_factory=dict)  # `megatron.core_args`
    rope_type: str = "rope"
    max_position_embeddings: int | None = None  # of the group `megatron`
    uses_bridge: bool = False  # `model.megatron_to_hf_mode=bridge`
    uses_hf_config: bool = False  # `model.use_hf_config_for_megatron`


def megatron_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `MEGATRON_DEFAULTS` of a model, those of experts only if it has experts.

    Args:
        config_json: of a family that Megatron-core trains.
    """
    config_json = flat_config(config_json)
    fields, family = hf_fields(config_json), find_family(config_json.get("model_type"))
    found = {
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config_json.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": bool(fields.get("attention_bias", False)),
        "qk_layernorm": bool(fields.get("use_qk_norm", False)) and not family.wide_qk_norm,
        "rotary_interleaved": False,
        # With dropout the logprobs before and after a step would not be comparable.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **_WITHOUT_SINKS,
    }
    if family.sinks:
        found |= sink_fields(config_json)
    if family.latent_attention:
        found |= mla_fields()
    if family.sigmoid_experts:
        found |= sigmoid_fields(config_json)
    elif fields.get("num_experts"):
        found |= {
            "moe_layer_freq": _expert_layers(config_json),
            # A softmax over the chosen experts equals one over all experts that is normalised over the chosen ones.
            "moe_router_pre_softmax": not fields.get("norm_topk_prob", False),
            "moe_router_score_function": "softmax",
            "moe_shared_expert_intermediate_size": fields.get("gated_shared_size"),
        }
    return found | dict(family.megatron_fields)


def transformer_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """`megatron_fields`, and those in which layers of a family differ from all others."""
    return megatron_fields(config_json) | _layer_kinds(flat_config(config_json))


def _layer_kinds(config_json: Mapping[str, Any]) -> dict[str, Any]:
    if find_family(config_json.get("model_type")).delta_net:
        return delta_fields(config_json)
    return {"moe_shared_expert_gate": True} if hf_fields(config_json).get("gated_shared_size") else {}


def has_latent_attention(config_json: Mapping[str, Any]) -> bool:
    """Whether a model has multi-head latent attention."""
    return find_family(config_json.get("model_type")).latent_attention


def check_architecture(config_json: Mapping[str, Any], keys: MegatronKeys) -> list[Problem]:
    """Reports everything that Megatron-core cannot compute of a model, and keys that contradict its `config.json`."""
    family = keys.family or str(config_json.get("model_type"))
    if not find_family(family).megatron:
        path = "model.name" if keys.family is not None else "model.model_type"
        rule = f"be one of {', '.join(names_with('megatron'))} with train.backend=megatron"
        return [Problem(path=path, rule=rule, value=family, fix=_USE_FSDP)]
    config_json = flat_config(config_json)
    problems = _check_layers(config_json)
    if has_latent_attention(config_json):
        problems += check_mla(config_json, fix=_USE_FSDP)
    if find_family(config_json.get("model_type")).sigmoid_experts:
        problems += check_sigmoid(config_json, fix=_USE_FSDP)
    if find_family(config_json.get("model_type")).delta_net:
        problems += check_delta(config_json, fix=_USE_FSDP)
    if find_family(config_json.get("model_type")).sinks:
        problems += check_sinks(config_json, fix=_USE_FSDP)
    problems += [
        _contradiction(f"model.{name}", given=keys.fields[name], found=found)
        for name, found in hf_fields(config_json).items()
        if keys.fields.get(name) is not None and not _means_the_same(name, keys.fields[name], found)
    ]
    fields = megatron_fields(config_json)
    # The softmax over all or over the chosen experts is a choice of softmax routing only.
    unused = ("moe_router_pre_softmax",) if fields.get("moe_router_score_function") == "sigmoid" else ()
    problems += [
        _contradiction(f"megatron.{name}", given=keys.core_args[name], found=found)
        for name, found in {**fields, **_layer_kinds(config_json)}.items()
        if name in keys.core_args and not (_means_the_same(name, keys.core_args[name], found) or name in unused)
    ]
    # `rope` is also the default; with `use_hf_config_for_megatron` the checkpoint decides, so only `yarn` can be wrong.
    if keys.rope_type == "yarn" or not keys.uses_hf_config:
        problems += check_rope_type(config_json, keys.rope_type)
    problems += _check_positions(config_json, keys)
    problems += check_bridge(family, keys)
    problems += _check_mtp(config_json, keys)
    problems += _check_unset_fields(fields, keys)
    return problems


def _check_unset_fields(fields: Mapping[str, Any], keys: MegatronKeys) -> list[Problem]:
    """Reports fields that would get a wrong default, where `config.json` does not set them."""
    unset = {
        name: found
        for name, found in fields.items()
        if name not in keys.core_args and not _means_the_same(name, MEGATRON_DEFAULTS[name], found)
    }
    if not unset or keys.uses_hf_config:
        return []
    overrides = " ".join(f"megatron.{name}={show(found)}" for name, found in unset.items())
    rule = "be true where megatron leaves fields unset in which the model differs from Megatron-core's defaults"
    path = "model.use_hf_config_for_megatron"
    return [Problem(path=path, rule=rule, value="false", fix=f"set it to true, or add {overrides}")]


_ONE_IS_NONE = ("moe_router_num_groups", "moe_router_group_topk", "n_group", "topk_group")
"""Counts of groups of experts: a single group restricts nothing."""


def _means_the_same(name: str, given: object, found: object) -> bool:
    """Whether two values of a field describe the same layers."""
    if given == found:
        return True
    if name in _ONE_IS_NONE:
        return {given, found} <= {None, 1}
    if name == "moe_router_topk_scaling_factor":
        return {given, found} <= {None, 1.0}
    # One number for all layers, or a list with an entry for each of them.
    lists = [each for each in (given, found) if isinstance(each, list)]
    return name == "moe_layer_freq" and len(lists) == 1 and 1 in (given, found) and set(lists[0]) == {1}


def check_rope_type(config_json: Mapping[str, Any], given: str) -> list[Problem]:
    """Reports a `megatron.rope_type` that is not the model's."""
    found = read_rope_type(config_json)
    if given == found:
        return []
    return [replace(_contradiction("megatron.rope_type", given=given, found=found), fix=f"set it to {found}")]


def read_rope_type(config_json: Mapping[str, Any]) -> str:
    """The value of `megatron.rope_type` for a model: `rope` or `yarn`."""
    return "yarn" if _rope_parameters(flat_config(config_json))["rope_type"] == "yarn" else "rope"


def check_bridge(family: str, keys: MegatronKeys) -> list[Problem]:
    """Reports weights that mbridge does not convert: those of some families, and layers for multi-token prediction.

    It has names of the latter for models of 61 layers only (DeepSeek-V3), and leaves the inputs of MiMo's `eh_proj` in
    the order of the checkpoint, which is not that of Megatron-core.
    """
    if not keys.uses_bridge:
        return []
    if not find_family(family).bridge:
        rule = f"be raw for a {family} model; mbridge converts {', '.join(names_with('bridge'))}"
    elif keys.core_args.get("mtp_num_layers"):
        rule = "be raw with megatron.mtp_num_layers, whose layers mbridge does not convert"
    else:
        return []
    return [Problem(path="model.megatron_to_hf_mode", rule=rule, value="bridge", fix="remove it")]


def _check_mtp(config_json: Mapping[str, Any], keys: MegatronKeys) -> list[Problem]:
    """Reports a number of layers for multi-token prediction that the checkpoint does not have."""
    given, path = keys.core_args.get("mtp_num_layers"), "megatron.mtp_num_layers"
    if not given:
        return []
    family = find_family(keys.family or config_json.get("model_type"))
    if family.mtp is None:
        known = ", ".join(name for name, each in load_families().items() if each.mtp is not None)
        rule, fix = f"be null for a {family.name} model", f"remove it; models of {known} may have such layers"
        return [Problem(path=path, rule=rule, value=show(given), fix=fix)]
    found = int(hf_fields(config_json).get("num_nextn_predict_layers") or 0)
    if given == found:
        return []
    rule = f"be {found or 'null'}, as num_nextn_predict_layers in config.json"
    return [Problem(path=path, rule=rule, value=show(given), fix=f"set it to {found}" if found else "remove it")]


def _check_positions(config_json: Mapping[str, Any], keys: MegatronKeys) -> list[Problem]:
    """Reports a wrong `megatron.max_position_embeddings`. With YaRN the original length is right, too."""
    given, found = keys.max_position_embeddings, config_json.get("max_position_embeddings")
    original = _rope_parameters(config_json).get("original_max_position_embeddings")
    if given is None or found is None or given in (found, original):
        return []
    return [_contradiction("megatron.max_position_embeddings", given=given, found=found)]


def _contradiction(path: str, *, given: object, found: object) -> Problem:
    return Problem(path=path, rule=f"be {show(found)}, as in config.json", value=show(given), fix="remove it")


def _check_layers(config_json: Mapping[str, Any]) -> list[Problem]:
    """Reports features that the layers for Megatron-core do not have."""
    problems = []
    rope = _rope_parameters(config_json)
    supported = {
        "hidden_act": (config_json.get("hidden_act", "silu"), ("silu",)),
        "rope_type": (rope["rope_type"], _ROPE_TYPES),
        "use_sliding_window": (bool(config_json.get("use_sliding_window", False)), (False,)),
        "mlp_bias": (bool(config_json.get("mlp_bias", False)), (False,)),
    }
    for name, (value, known) in supported.items():
        if value not in known:
            rule = f"have {name}={' or '.join(show(each) for each in known)} in its config.json with Megatron-core"
            problems.append(Problem(path="model.hf_checkpoint", rule=rule, value=show(value), fix=_USE_FSDP))
    window = config_json.get("sliding_window")
    if window is not None and find_family(config_json.get("model_type")).sliding_window:
        rule = "have sliding_window=null in its config.json with Megatron-core"
        problems.append(Problem(path="model.hf_checkpoint", rule=rule, value=show(window), fix=_USE_FSDP))
    scale = rope.get("attention_factor")
    if rope["rope_type"] == "yarn" and scale is not None and float(scale) < 1:
        rule = "have no attention_factor below 1 in its rope_parameters with Megatron-core"
        problems.append(Problem(path="model.hf_checkpoint", rule=rule, value=show(scale), fix=_USE_FSDP))
    return problems


def _rope_parameters(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters`, with `rope_type`. Older files have `rope_scaling`, some of them with the key `type`."""
    rope = dict(config_json.get("rope_parameters") or config_json.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "mrope":  # of Qwen2.5-VL: the default frequencies, for three rows of positions
        rope["rope_type"] = "default"
    return rope


def _expert_layers(config_json: Mapping[str, Any]) -> int | list[int]:
    """1 if every layer has experts; else 1 or 0 for each layer."""
    a = Architecture.from_config_json(config_json)
    return [int(a.has_experts(layer)) for layer in range(a.num_layers)] if a.is_mixed else 1
