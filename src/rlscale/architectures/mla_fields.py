"""TransformerConfig fields of models with multi-head latent attention (MLA), as in DeepSeek-V3 (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.architectures.sigmoid_fields import check_supported_fields
from rlscale.errors import Problem


def mla_fields() -> dict[str, Any]:
    """The fields in which such a model differs from one with grouped-query attention."""
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latents
        "rotary_interleaved": False,  # Megatron-core's latent attention always rotates neighbouring pairs
    }


def check_mla(config_json: Mapping[str, Any], *, fix: str) -> list[Problem]:
    """Reports fields of such a model that Megatron-core computes in another way, or does not have.

    Args:
        config_json: of a family with `latent_attention`.
        fix: what to do instead.
    """
    supported = {
        "rope_interleave": (config_json.get("rope_interleave", True), (True, None)),
        "attention_bias": (bool(config_json.get("attention_bias", False)), (False,)),
    }
    return check_supported_fields(supported, fix=fix)
