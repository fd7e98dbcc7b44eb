"""Architectures in the keys of the group `model`: of a checkpoint's `config.json`, and of models made on the spot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlscale.config.groups.model import ModelBuild, ModelConfig

CONFIG_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model_type": ("model_type",),
        "num_layers": ("num_hidden_layers",),
        "hidden_size": ("hidden_size",),
        "intermediate_size": ("intermediate_size",),
        "num_attention_heads": ("num_attention_heads",),
        "num_key_value_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "vocab_size": ("vocab_size",),
        "max_position_embeddings": ("max_position_embeddings",),
        "tie_word_embeddings": ("tie_word_embeddings",),
        "rotary_base": ("rope_theta",),
        "attention_bias": ("attention_bias",),
        "use_qk_norm": ("use_qk_norm",),
        "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
        "num_experts_per_tok": ("num_experts_per_tok",),
        "moe_intermediate_size": ("moe_intermediate_size",),
        "num_shared_experts": ("n_shared_experts",),
        "first_k_dense_replace": ("first_k_dense_replace",),
        "norm_topk_prob": ("norm_topk_prob",),
        "n_group": ("n_group",),
        "topk_group": ("topk_group",),
        "routed_scaling_factor": ("routed_scaling_factor",),
        "q_lora_rank": ("q_lora_rank",),
        "kv_lora_rank": ("kv_lora_rank",),
        "qk_nope_head_dim": ("qk_nope_head_dim",),
        "qk_rope_head_dim": ("qk_rope_head_dim",),
        "v_head_dim": ("v_head_dim",),
        "num_nextn_predict_layers": ("num_nextn_predict_layers",),
    }
)
"""Key of the group `model` -> the names that families give it in `config.json`, the first that is there counts."""

IMPLIED: Mapping[str, Mapping[str, bool | int]] = MappingProxyType(
    {
        "llama": {"use_qk_norm": False},
        "qwen2": {"attention_bias": True, "use_qk_norm": False},
        "qwen3": {"use_qk_norm": True},
        "qwen3_moe": {"use_qk_norm": True, "num_shared_experts": 0, "first_k_dense_replace": 0},
        "glm4": {"use_qk_norm": False},
        "deepseek_v3": {},
    }
)
"""What the code of a family fixes, so that its `config.json` does not say it."""


EMBEDDED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` that the embedded engine runs."""


def figures_of(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a `config.json` gives, by key of the group `model`; those it leaves open are absent.

    Args:
        config_json: its content. Newer versions of transformers keep the RoPE theta in `rope_parameters`.
    """
    rope = config_json.get("rope_parameters")
    values = {**(rope if isinstance(rope, Mapping) else {}), **config_json}
    figures = dict(IMPLIED.get(str(values.get("model_type")), {}))
    for key, names in CONFIG_NAMES.items():
        found = next((values[name] for name in names if values.get(name) is not None), None)
        if found is not None:
            figures[key] = found
    return figures


_TINY: Mapping[str, int | bool] = MappingProxyType(
    {
        "num_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 101,  # the tokens of the character tokenizer
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rotary_base": 10_000,
    }
)

TINY_MODELS: Mapping[ModelBuild, Mapping[str, int | float | bool]] = MappingProxyType(
    {
        ModelBuild.tiny_qwen3: _TINY,
        ModelBuild.tiny_qwen3_moe: MappingProxyType(
            {
                **{name: value for name, value in _TINY.items() if name != "intermediate_size"},
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 192,
                "norm_topk_prob": True,
            }
        ),
        ModelBuild.tiny_deepseek_v3: MappingProxyType(
            {
                **{name: value for name, value in _TINY.items() if name not in ("num_key_value_heads", "head_dim")},
                "q_lora_rank": 64,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 16,
                "v_head_dim": 32,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 96,
                "num_shared_experts": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "n_group": 2,
                "topk_group": 1,
                "routed_scaling_factor": 2.5,
            }
        ),
    }
)
"""What shapes a model of `model.build`, and what holds for a key that is not set. Other figures do not reach it."""


def figures_of_build(build: ModelBuild) -> dict[str, Any]:
    """The figures of a model made on the spot, with those that its family fixes, where the config sets none."""
    kind = str(build).removeprefix("tiny_")
    return {"model_type": kind, "attention_bias": False, **IMPLIED[kind], **TINY_MODELS[build]}


def architecture_fields(model: ModelConfig) -> dict[str, Any]:
    """What the config says, and where it says nothing the model made on the spot or the checkpoint's `config.json`."""
    found = figures_of_build(model.build) if model.build is not None else read_figures(model.hf_checkpoint)
    return {**found, **{name: value for name, value in vars(model).items() if value is not None}}


def read_figures(checkpoint: str | None) -> dict[str, Any]:
    """The figures in `config.json` of a folder, or of a hub id that is in the local cache; empty without one."""
    return figures_of(read_config_json(checkpoint))


def read_config_json(checkpoint: str | None) -> dict[str, Any]:
    """The content of `config.json` of a folder, or of a hub id that is in the local cache; empty without one."""
    for file in _config_files(checkpoint):
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return {}  # who loads the model says what is wrong with the file
            return content if isinstance(content, dict) else {}
    return {}


def _config_files(checkpoint: str | None) -> list[Path]:
    if checkpoint is None:
        return []
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    cached = Path(hub).expanduser() / f"models--{checkpoint.replace('/', '--')}" / "snapshots"
    return [Path(checkpoint).expanduser() / "config.json", *sorted(cached.glob("*/config.json"), reverse=True)]
