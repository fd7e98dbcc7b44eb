"""What a decoder must know of a model: read from a Hugging Face config, so that any Llama-like model runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ELSEWHERE = "this model needs rollout.engine=sglang"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the experts of a token are chosen."""

    num_experts: int
    num_per_token: int
    normalized: bool  # the weights of the chosen ones sum to one


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Figures of a decoder: pre-norm, rotary positions, grouped-query attention, gated SiLU MLP or experts of them."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    tied: bool  # the output layer is the embedding
    rotary: Mapping[str, Any]  # `rope_parameters` of the config
    routing: Routing | None  # of the layers that have experts
    raw: Mapping[str, Any]  # the whole config

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json.

    Raises ValueError naming the key that this engine does not run.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {kind}; {ELSEWHERE}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act must be silu, got {activation}; {ELSEWHERE}")
    window = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    max_positions = int(config["max_position_embeddings"])
    if window is not None and window < max_positions:
        max_positions = int(window)  # up to here a sliding window is full attention
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return Architecture(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        tied=bool(config.get("tie_word_embeddings", False)),
        rotary=_rotary(config),
        routing=_routing(config),
        raw=dict(config),
    )


def rotary_tables(architecture: Architecture, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position, [length, head_dim] each, in fp32.

    The frequencies of other types than `default` are those of transformers' own functions.
    """
    kind = architecture.rotary["rope_type"]
    scale = 1.0
    if kind == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
        inverse = 1.0 / (float(architecture.rotary["rope_theta"]) ** exponents)
    else:
        # Heavy to import, and most models do without.
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope_type must be default, linear, llama3 or yarn, got {kind}; {ELSEWHERE}")
        raw = dict(architecture.raw)
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`; before it was `rope_theta` and `rope_scaling`.
    rotary = dict(config.get("rope_scaling") or {})
    rotary.update(config.get("rope_parameters") or {})
    rotary.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rotary["rope_type"] = rotary.get("rope_type") or rotary.get("type") or "default"
    if float(rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1; {ELSEWHERE}")
    return rotary


def _routing(config: Mapping[str, Any]) -> Routing | None:
    if "num_experts_per_tok" not in config:
        return None
    return Routing(
        # The first name is that of published checkpoints, the second that of transformers 5.
        num_experts=int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
        num_per_token=int(config["num_experts_per_tok"]),
        normalized=bool(config.get("norm_topk_prob", False)),
    )
