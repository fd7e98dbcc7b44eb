"""The view of an architecture that the decoder of the embedded engine computes with, from a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import Family, find_family, names_with
from rlscale.architectures.hf_config import flat_config, hf_fields

USE_SGLANG = "serve this model with SGLang (rollout.engine=sglang in a run)"


class RouterScore(StrEnum):
    """Function of the router's logits that gives the weights of experts."""

    softmax = "softmax"  # over all experts
    chosen_softmax = "chosen_softmax"  # over the chosen experts
    sigmoid = "sigmoid"  # of each expert by itself; a bias is added for the choice alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Choice of the experts of a token."""

    num_experts: int
    num_per_token: int
    normalized: bool  # the weights of the chosen experts sum to one
    score: RouterScore = RouterScore.softmax
    num_groups: int = 1  # of experts
    groups_per_token: int = 1  # experts are chosen from these groups alone
    scale: float = 1.0  # of all weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedGate:
    """The gate of experts of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)` of clamped values."""

    alpha: float
    limit: float  # of the gate from above, of the up projection on both sides


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder: rotary positions, grouped-query or latent attention or gated delta nets, a gated SiLU MLP or experts.

    Example:
        config = DecoderConfig.from_config_json(json.loads(Path("config.json").read_text()))
        cos, sin = rotary_tables(config, length=512)
    """

    architecture: Architecture
    norm_eps: float
    max_positions: int
    rotary: Mapping[str, Any]  # `rope_parameters` of the config
    rotary_dim: int  # dimensions of a head that are rotated: its first ones, with latent attention its last ones
    rotates_pairs: bool  # dimension i is rotated with i + 1 for even i, else with i + rotary_dim / 2
    routing: Routing | None  # of the layers that have experts
    clamped_gate: ClampedGate | None  # of experts. None: a SiLU gate
    window_layers: frozenset[int]  # layers in which a token attends to the last `architecture.window` tokens
    raw: Mapping[str, Any]  # the whole config

    @classmethod
    def from_config_json(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """The view of the content of a `config.json`.

        Raises:
            ValueError: the embedded engine does not run such a model; the message names the key.
        """
        family = find_family(config.get("model_type"))
        config = flat_config(config)
        if not family.embedded:
            known = ", ".join(names_with("embedded"))
            raise ValueError(f"model_type must be one of {known}, got {family.name}; {USE_SGLANG}")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"hidden_act must be silu, got {activation}; {USE_SGLANG}")
        architecture, rotary = Architecture.from_config_json(config), _rotary(config, family)
        rotates_pairs = bool(family.megatron_fields.get("rotary_interleaved", False))
        if architecture.is_latent:
            rotates_pairs = bool(config.get("rope_interleave", True))
        gate = ClampedGate(alpha=float(config.get("swiglu_alpha", 1.702)), limit=float(config.get("swiglu_limit", 7.0)))
        return cls(
            architecture=architecture,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=_max_positions(config, family),
            rotary=rotary,
            rotary_dim=_rotary_dim(architecture, rotary),
            rotates_pairs=rotates_pairs,
            routing=_routing(config, family),
            clamped_gate=gate if family.sinks else None,
            window_layers=_window_layers(config) if family.sinks else frozenset(),
            raw=dict(config),
        )

    @property
    def has_zero_centered_norms(self) -> bool:
        """Whether norms of hidden states scale by 1 + weight."""
        return self.architecture.delta is not None

    @property
    def attention_scale(self) -> float | None:
        """Factor of the scores of attention; None: `head_dim ** -0.5`."""
        if not self.architecture.is_latent:
            return None
        scale = float(self.architecture.query_width**-0.5)
        weight = float(self.rotary.get("mscale_all_dim") or 0.0)
        if self.rotary["rope_type"] == "default" or not weight:
            return scale
        # As in DeepSeek-V3: queries and keys are scaled whole, also the part that is not rotated.
        factor = float(self.rotary["factor"])
        mscale = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
        return scale * mscale**2


def rotary_tables(config: DecoderConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position, [length, rotary_dim] each, in float32.

    The frequencies of types other than `default` come from transformers.
    """
    kind, width = config.rotary["rope_type"], config.rotary_dim
    scale = 1.0
    if kind == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        inverse = 1.0 / (float(config.rotary["rope_theta"]) ** exponents)
    else:
        # Imported here: transformers is slow to import, and most models do not need it.
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope_type must be default, linear, llama3 or yarn, got {kind}; {USE_SGLANG}")
        raw = dict(config.raw)
        family = find_family(raw.pop("model_type"))
        hf_config = AutoConfig.for_model(family.transformers_name or family.name, **raw)
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    angles = torch.outer(torch.arange(length).float(), inverse)
    # The two dimensions that are rotated together use the same angle.
    angles = angles.repeat_interleave(2, dim=-1) if config.rotates_pairs else torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _max_positions(config: Mapping[str, Any], family: Family) -> int:
    """The longest context. Up to the length of a sliding window, the window is the same as full attention."""
    positions = int(config["max_position_embeddings"])
    slides = config.get("use_sliding_window", family.sliding_window)
    window = config.get("sliding_window") if slides else None
    return positions if window is None else min(positions, int(window))


def _rotary(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`.
    rotary = dict(config.get("rope_scaling") or {})
    rotary.update(config.get("rope_parameters") or {})
    if family.sinks and not rotary:
        # The code of the family would use YaRN with factors that are nowhere in its config.
        raise ValueError(f"rope_parameters must be set for model_type={family.name}; {USE_SGLANG}")
    rotary.setdefault("rope_theta", config.get("rope_theta", family.rotary_base))
    rotary["rope_type"] = rotary.get("rope_type") or rotary.get("type") or "default"
    if rotary["rope_type"] == "mrope":  # the older name; sections alone say that positions have three rows
        rotary["rope_type"] = "default"
    own = family.rotary_fraction
    if config.get("rotary_dim") is not None and own is not None:
        own = float(config["rotary_dim"]) / Architecture.from_config_json(config).head_dim
    found = float(rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", own or 1.0)))
    if found != 1.0 and family.rotary_fraction is None:
        raise ValueError(f"partial_rotary_factor must be 1 with model_type={family.name}; {USE_SGLANG}")
    rotary["partial_rotary_factor"] = found
    return rotary


def _rotary_dim(a: Architecture, rotary: Mapping[str, Any]) -> int:
    return a.rope_dim if a.is_latent else int(a.head_dim * rotary["partial_rotary_factor"])


def _routing(config: Mapping[str, Any], family: Family) -> Routing | None:
    fields = hf_fields(config)
    if not fields.get("num_experts_per_tok") or not fields.get("num_experts"):
        return None
    is_sigmoid = family.sigmoid_experts
    score = RouterScore.chosen_softmax if family.sinks else RouterScore.softmax
    return Routing(
        num_experts=int(fields["num_experts"]),
        num_per_token=int(fields["num_experts_per_tok"]),
        normalized=bool(fields.get("norm_topk_prob", is_sigmoid)),
        score=RouterScore.sigmoid if is_sigmoid else score,
        num_groups=int(fields.get("n_group") or 1) if is_sigmoid else 1,
        groups_per_token=int(fields.get("topk_group") or 1) if is_sigmoid else 1,
        scale=float(fields.get("routed_scaling_factor", 1.0)) if is_sigmoid else 1.0,
    )


def _window_layers(config: Mapping[str, Any]) -> frozenset[int]:
    window, full = known = ("sliding_attention", "full_attention")
    kinds = config.get("layer_types")
    if kinds is None:
        # As in transformers: every other layer, from the first on.
        kinds = [known[i % 2] for i in range(int(config["num_hidden_layers"]))]
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise ValueError(f"layer_types must be {window} or {full}, got {unknown[0]}; {USE_SGLANG}")
    return frozenset(i for i, kind in enumerate(kinds) if kind == window)
