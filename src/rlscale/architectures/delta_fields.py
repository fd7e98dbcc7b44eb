"""TransformerConfig fields of models with gated delta nets between layers of gated attention, as in Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.architectures.hf_config import hf_fields
from rlscale.architectures.sigmoid_fields import check_supported_fields
from rlscale.errors import Problem

_LAYER_TYPES = ("full_attention", "linear_attention")


def delta_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which such a model differs from one with grouped-query attention. No key can change them.

    Args:
        config_json: of a family with `delta_net`.
    """
    fields = hf_fields(config_json)
    linear = set(fields["linear_layers"])
    return {
        "experimental_attention_variant": "gated_delta_net",
        # 1 for each layer with linear attention, else 0
        "linear_attention_freq": [int(layer in linear) for layer in range(int(fields["num_layers"]))],
        "linear_conv_kernel_dim": fields["linear_conv_width"],
        "linear_key_head_dim": fields["linear_key_width"],
        "linear_value_head_dim": fields["linear_value_width"],
        "linear_num_key_heads": fields["linear_key_heads"],
        "linear_num_value_heads": fields["linear_value_heads"],
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "moe_shared_expert_gate": bool(fields.get("gated_shared_size")),
    }


def check_delta(config_json: Mapping[str, Any], *, fix: str) -> list[Problem]:
    """Reports fields of such a model that the layers for Megatron-core do not have.

    Args:
        config_json: of a family with `delta_net`.
        fix: what to do instead.
    """
    kinds = set(config_json.get("layer_types") or ()) - set(_LAYER_TYPES)
    supported: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "attention_bias": (bool(config_json.get("attention_bias", False)), (False,)),
        "layer_types": (min(kinds, default=_LAYER_TYPES[0]), _LAYER_TYPES),
    }
    return check_supported_fields(supported, fix=fix)
