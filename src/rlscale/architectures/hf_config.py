"""Architecture fields (keys of the config group `model`) from a checkpoint's `config.json` or a tiny model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlscale.architectures.family import find_family

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
        "attention_bias": ("attention_bias", "qkv_bias"),
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
"""Key of the group `model` -> its names in `config.json`, which differ between families. The first one found counts."""


def flat_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` whose fields of the decoder, which models with images have in an object, are at the top level."""
    # `vision_config` has fields of the same names, so it stays an object.
    return {**(config_json.get("text_config") or {}), **config_json}


def hf_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture fields of a `config.json`, by key of the group `model`. Fields that it does not set are absent.

    Some fields are no keys: `dense_layers`, the layers without experts if others come before them, `gated_shared_size`,
    the width of a shared expert with a gate, `window` and `num_window_layers`, of sliding windows, and `linear_*`, of
    layers with linear attention.

    Args:
        config_json: its content.
    """
    config_json = flat_config(config_json)
    # transformers 5 writes the RoPE theta into `rope_parameters`; earlier versions wrote it at the top level.
    rope = config_json.get("rope_parameters")
    values = {**(rope if isinstance(rope, Mapping) else {}), **config_json}
    fields: dict[str, Any] = dict(find_family(values.get("model_type")).implied)
    for key, names in CONFIG_NAMES.items():
        found = next((values[name] for name in names if values.get(name) is not None), None)
        if found is not None:
            fields[key] = found
    if "num_experts" in fields and "num_layers" in fields:
        fields |= _dense_layers(values, int(fields["num_layers"]))
    fields |= _window_layers(values, fields.get("num_layers"))
    if find_family(values.get("model_type")).delta_net and "num_layers" in fields:
        fields |= _linear_layers(values, int(fields["num_layers"]))
    if find_family(values.get("model_type")).gated_shared_expert and values.get("shared_expert_intermediate_size"):
        fields["gated_shared_size"] = values["shared_expert_intermediate_size"]
    if "num_experts" in fields and "intermediate_size" in fields:
        # Families without dense layers have no other width.
        fields.setdefault("moe_intermediate_size", fields["intermediate_size"])
    return fields


def _dense_layers(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of the layers without experts where a `config.json` lists layers; empty where it counts them."""
    if values.get("mlp_layer_types"):
        # transformers 5 writes the kind of each layer; published files count the dense ones at the start.
        dense = [i for i, kind in enumerate(values["mlp_layer_types"]) if kind == "dense"]
    elif values.get("mlp_only_layers") or values.get("decoder_sparse_step"):
        # As in transformers: layer i has experts if (i + 1) is a multiple of the step and i is not listed as dense.
        listed, step = set(values.get("mlp_only_layers") or ()), int(values.get("decoder_sparse_step") or 1)
        dense = [i for i in range(num_layers) if i in listed or (i + 1) % step]
    else:
        return {}
    is_start = dense == list(range(len(dense)))
    return {"first_k_dense_replace": len(dense)} if is_start else {"dense_layers": dense}


def _window_layers(values: Mapping[str, Any], num_layers: int | None) -> dict[str, int]:
    """The fields of sliding windows of a `config.json`; empty where no layer has one."""
    window, family = values.get("sliding_window"), find_family(values.get("model_type"))
    if not window or num_layers is None:
        return {}
    if values.get("layer_types"):
        number = list(values["layer_types"]).count("sliding_attention")
    elif not values.get("use_sliding_window", family.sliding_window):
        number = 0
    else:
        # As in transformers for Qwen2 and Qwen3: the layers from `max_window_layers` on.
        first = values.get("max_window_layers") or 0 if family.name in ("qwen2", "qwen3") else 0
        number = max(num_layers - int(first), 0)
    return {"window": int(window), "num_window_layers": number} if number else {}


_LINEAR_SIZES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "linear_conv_width": ("linear_conv_kernel_dim", 4),
        "linear_key_width": ("linear_key_head_dim", 128),
        "linear_value_width": ("linear_value_head_dim", 128),
        "linear_key_heads": ("linear_num_key_heads", 16),
        "linear_value_heads": ("linear_num_value_heads", 32),
    }
)
"""Sizes of a gated delta net -> their names in `config.json`, and the default of transformers."""


def _linear_layers(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of layers with linear attention of a `config.json`, with their indices as `linear_layers`."""
    kinds = values.get("layer_types")
    if kinds is None:
        # As in transformers: each layer of a full interval but the last.
        interval = int(values.get("full_attention_interval") or 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    sizes = {key: int(values.get(name, default)) for key, (name, default) in _LINEAR_SIZES.items()}
    return {"linear_layers": [i for i, kind in enumerate(kinds) if kind == "linear_attention"], **sizes}


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

# The tokens of the agent's tokenizer and four for images.
_TINY_TEXT_OF_VISION: Mapping[str, int] = MappingProxyType({"vocab_size": 109, "max_position_embeddings": 1024})

TINY_VISION: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny_qwen2_5_vl": MappingProxyType(
            {"depth": 2, "window_size": 16, "fullatt_block_indexes": (1,), "intermediate_size": 128}
        ),
        "tiny_qwen3_vl": MappingProxyType(
            {
                "depth": 3,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": (0, 1),
                "intermediate_size": 128,
                "hidden_act": "gelu_pytorch_tanh",
            }
        ),
    }
)
"""`model.build` -> fields of the vision tower that the two families do not share."""

TINY_TOWER: Mapping[str, int] = MappingProxyType(
    {"hidden_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
)
"""Fields of every tiny vision tower: an image of 32 x 32 pixels has 64 patches and becomes 16 tokens."""

TINY_MODELS: Mapping[str, Mapping[str, int | float | bool]] = MappingProxyType(
    {
        "tiny_qwen3": _TINY,
        # The agent's character tokenizer has tokens for tools; prompts with tools are longer.
        "tiny_qwen3_agent": MappingProxyType({**_TINY, "vocab_size": 105, "max_position_embeddings": 2048}),
        "tiny_qwen3_moe": MappingProxyType(
            {
                **{name: value for name, value in _TINY.items() if name != "intermediate_size"},
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 192,
                "norm_topk_prob": True,
            }
        ),
        "tiny_qwen2_5_vl": MappingProxyType(
            {
                **{name: value for name, value in _TINY.items() if name != "head_dim"},
                **_TINY_TEXT_OF_VISION,
                "num_layers": 3,
                "hidden_size": 96,
                "intermediate_size": 256,
            }
        ),
        "tiny_qwen3_vl": MappingProxyType({**_TINY, **_TINY_TEXT_OF_VISION}),
        "tiny_deepseek_v3": MappingProxyType(
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
"""`model.build` -> the fields that shape the model, with their defaults. Other fields have no effect on it."""


def tiny_model_fields(build: str) -> dict[str, Any]:
    """The architecture fields of a model built by `model.build`, with those that its family implies."""
    family = find_family(str(build).removeprefix("tiny_").removesuffix("_agent"))
    return {"model_type": family.name, "attention_bias": False, **family.implied, **TINY_MODELS[build]}


def tiny_config_json(build: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the `config.json` of a model built by `model.build` that describes its architecture.

    Args:
        given: values of the config group `model`. None: the default of the tiny model.
    """
    shape = {name: default if given.get(name) is None else given[name] for name, default in TINY_MODELS[build].items()}
    named = {CONFIG_NAMES[name][0]: value for name, value in shape.items()}
    rope = {"rope_type": "default", "rope_theta": float(named.pop("rope_theta"))}
    model_type = tiny_model_fields(build)["model_type"]
    return {"model_type": model_type, "hidden_act": "silu", "rope_parameters": rope, **named}


def architecture_fields(given: Mapping[str, Any], *, build: str | None, hf_checkpoint: str | None) -> dict[str, Any]:
    """The architecture fields of a run: those of the config, else those of the tiny model or of the checkpoint.

    Args:
        given: values of the config group `model`. None: not set.
        build: `model.build`.
        hf_checkpoint: `model.hf_checkpoint`, which is read if `build` is None.
    """
    found = tiny_model_fields(build) if build is not None else read_hf_fields(hf_checkpoint)
    return {**found, **{name: value for name, value in given.items() if value is not None}}


def read_hf_fields(checkpoint: str | None) -> dict[str, Any]:
    """The architecture fields in the `config.json` of a checkpoint, as `read_config_json` finds it."""
    return hf_fields(read_config_json(checkpoint))


def read_config_json(checkpoint: str | None) -> dict[str, Any]:
    """The content of `config.json` of a folder, or of a hub id in the local cache. Empty if there is none."""
    for file in _config_files(checkpoint):
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return {}  # the code that loads the model reports the broken file
            return content if isinstance(content, dict) else {}
    return {}


def local_model_folder(checkpoint: str | None) -> Path | None:
    """The folder with the `config.json` of a folder, or of a hub id in the local cache. None: it is not here."""
    return next((file.parent for file in _config_files(checkpoint) if file.is_file()), None)


def _config_files(checkpoint: str | None) -> list[Path]:
    if checkpoint is None:
        return []
    # The same places as in huggingface_hub, which takes too long to import here.
    get = os.environ.get
    home = get("HF_HOME") or Path(get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    hub = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    cached = (
        Path(os.path.expanduser(os.path.expandvars(hub))) / f"models--{checkpoint.replace('/', '--')}" / "snapshots"
    )
    return [Path(os.path.expanduser(checkpoint)) / "config.json", *sorted(cached.glob("*/config.json"), reverse=True)]
