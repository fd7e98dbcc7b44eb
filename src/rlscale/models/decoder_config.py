"""The view of an architecture that the decoder of the embedded engine computes with, from a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import Family, find_family, names_with

USE_SGLANG = "serve this model with SGLang (rollout.engine=sglang in a run)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Choice of the experts of a token."""

    num_experts: int
    num_per_token: int
    normalized: bool  # the weights of the chosen experts sum to one


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder: pre-norm, rotary positions, grouped-query attention, and a gated SiLU MLP or experts of them.

    Example:
        config = DecoderConfig.from_config_json(json.loads(Path("config.json").read_text()))
        cos, sin = rotary_tables(config, length=512)
    """

    architecture: Architecture
    norm_eps: float
    max_positions: int
    rotary: Mapping[str, Any]  # `rope_parameters` of the config
    routing: Routing | None  # of the layers that have experts
    raw: Mapping[str, Any]  # the whole config

    @classmethod
    def from_config_json(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """The view of the content of a `config.json`.

        Raises:
            ValueError: the embedded engine does not run such a model; the message names the key.
        """
        family = find_family(config.get("model_type"))
        if family.vision is not None:
            # The decoder's fields are those of `text_config`; the tower reads its own.
            text = {name: value for name, value in (config.get("text_config") or {}).items() if name != "model_type"}
            config = {**text, **config}
        if not family.embedded:
            known = ", ".join(names_with("embedded"))
            raise ValueError(f"model_type must be one of {known}, got {family.name}; {USE_SGLANG}")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"hidden_act must be silu, got {activation}; {USE_SGLANG}")
        return cls(
            architecture=Architecture.from_config_json(config),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=_max_positions(config, family),
            rotary=_rotary(config),
            routing=_routing(config),
            raw=dict(config),
        )


def rotary_tables(config: DecoderConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position, [length, head_dim] each, in float32.

    The frequencies of types other than `default` come from transformers.
    """
    kind, head_dim = config.rotary["rope_type"], config.architecture.head_dim
    scale = 1.0
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (float(config.rotary["rope_theta"]) ** exponents)
    else:
        # Imported here: transformers is slow to import, and most models do not need it.
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope_type must be default, linear, llama3 or yarn, got {kind}; {USE_SGLANG}")
        raw = dict(config.raw)
        hf_config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    # Both halves of a head use the same angles, as in transformers' `rotate_half`.
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _max_positions(config: Mapping[str, Any], family: Family) -> int:
    """The longest context. Up to the length of a sliding window, the window is the same as full attention."""
    positions = int(config["max_position_embeddings"])
    slides = config.get("use_sliding_window", family.sliding_window)
    window = config.get("sliding_window") if slides else None
    return positions if window is None else min(positions, int(window))


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`.
    rotary = dict(config.get("rope_scaling") or {})
    rotary.update(config.get("rope_parameters") or {})
    rotary.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rotary["rope_type"] = rotary.get("rope_type") or rotary.get("type") or "default"
    if rotary["rope_type"] == "mrope":  # the older name; sections alone say that positions have three rows
        rotary["rope_type"] = "default"
    if float(rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1; {USE_SGLANG}")
    return rotary


def _routing(config: Mapping[str, Any]) -> Routing | None:
    if "num_experts_per_tok" not in config:
        return None
    return Routing(
        # Published checkpoints use the first name, transformers 5 the second.
        num_experts=int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
        num_per_token=int(config["num_experts_per_tok"]),
        normalized=bool(config.get("norm_topk_prob", False)),
    )
