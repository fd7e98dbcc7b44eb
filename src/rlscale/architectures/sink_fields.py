"""TransformerConfig fields of gpt-oss: sinks, sliding windows by layer, biases, and clamped gates of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.architectures.hf_config import hf_fields
from rlscale.architectures.sigmoid_fields import check_quantization, check_supported_fields
from rlscale.errors import Problem

_KINDS = ("sliding_attention", "full_attention")
_ALPHA = 1.702
"""Factor of the sigmoid in the gate of an expert, which is fixed in Megatron-core's `quick_gelu`."""


def sink_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which such a model differs from one without sinks.

    Args:
        config_json: of a family with `sinks`.
    """
    has_window = [int(kind == _KINDS[0]) for kind in _layer_types(config_json)]
    window = config_json.get("sliding_window", 128) if any(has_window) else None
    return {
        "softmax_type": "learnable",
        # Megatron-core counts the tokens before a query, transformers the query too.
        "window_size": [int(window) - 1, 0] if window else None,
        "window_attn_skip_freq": has_window if window else None,
        "add_bias_linear": True,
        "activation_func_clamp_value": float(config_json.get("swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
    }


def check_sinks(config_json: Mapping[str, Any], *, fix: str) -> list[Problem]:
    """Reports fields of such a model that Megatron-core computes in another way, or does not have.

    Args:
        config_json: of a family with `sinks`.
        fix: what to do instead.
    """
    unknown = [kind for kind in _layer_types(config_json) if kind not in _KINDS]
    supported = {
        "attention_bias": (bool(config_json.get("attention_bias", True)), (True,)),
        "swiglu_alpha": (float(config_json.get("swiglu_alpha", _ALPHA)), (_ALPHA,)),
        "layer_types": (unknown[0] if unknown else _KINDS[0], _KINDS),
    }
    return [*check_supported_fields(supported, fix=fix), *check_quantization(config_json)]


def _layer_types(config_json: Mapping[str, Any]) -> list[str]:
    """The kind of attention of each layer; without the field every other one has a window, from the first on."""
    num_layers = int(hf_fields(config_json)["num_layers"])
    return list(config_json.get("layer_types") or [_KINDS[i % 2] for i in range(num_layers)])
