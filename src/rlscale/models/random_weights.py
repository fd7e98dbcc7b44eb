"""Models with random weights: small ones for `model.build`, and any `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import TINY_TOWER, TINY_VISION, tiny_model_fields
from rlscale.models.agent_tokenizer import IMAGE, IMAGE_END, IMAGE_START, VIDEO
from rlscale.models.hf_models import auto_model
from rlscale.models.tiny_tokenizer import tiny_tokenizer
from rlscale.models.transformers_aliases import register_aliases

INITIALIZER_RANGE = 0.05
"""Standard deviation of the random weights. The usual 0.02 suits widths in the thousands; at width 128 supervised
training on the arithmetic task then takes up to three times as many steps."""


_IMAGE_TOKENS = ("image", "video", "vision_start", "vision_end")

_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": TINY_TOWER["patch_size"],
    "temporal_patch_size": TINY_TOWER["temporal_patch_size"],
    "merge_size": TINY_TOWER["spatial_merge_size"],
    # Sizes in pixels: at most 64 x 64, which are 64 tokens.
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The `preprocessor_config.json` of a tiny model."""


def write_random(folder: Path, *, fields: Mapping[str, Any], init_seed: int, build: str) -> None:
    """Writes model, character tokenizer and, with images, the image processor into an existing folder.

    Args:
        folder: destination of the files.
        fields: the architecture, by the keys of the config group `model`.
        init_seed: seed of the weights; the random state of the caller does not change.
        build: of `model.build`.
    """
    tokenizer = tiny_tokenizer(build, int(fields["max_position_embeddings"]))
    if build in TINY_VISION:
        text = {name: value for name, value in fields.items() if name not in ("num_layers", "rotary_base")}
        text |= {"num_hidden_layers": fields["num_layers"], "rope_theta": float(fields["rotary_base"])}
        _save_vision(folder, str(tiny_model_fields(build)["model_type"]), text, tokenizer, seed=init_seed)
        return
    _save(folder, _architecture(fields, tokenizer), tokenizer, seed=init_seed)


def save_random_model(
    folder: Path, config_json: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> None:
    """Writes a model of any family that transformers has, with its tokenizer, into an existing folder.

    Args:
        folder: destination of the files.
        config_json: architecture, with `model_type`.
        tokenizer: of the model.
        seed: of the weights; the random state of the caller does not change.
    """
    register_aliases()
    if find_family(config_json["model_type"]).vision is not None:
        text = {name: value for name, value in config_json.items() if name not in ("model_type", "rope_parameters")}
        text |= {"rope_theta": config_json["rope_parameters"]["rope_theta"], "vocab_size": len(tokenizer)}
        _save_vision(folder, str(config_json["model_type"]), text, tokenizer, seed=seed)
        return
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    architecture = AutoConfig.for_model(**config_json, **tokens, dtype="float32")
    _save(folder, architecture, tokenizer, seed=seed)


def _save(folder: Path, architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_model(architecture.model_type).from_config(architecture)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would break the run's own display
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def _architecture(
    fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast
) -> Qwen3Config | Qwen3MoeConfig | DeepseekV3Config:
    shared: dict[str, Any] = {
        "vocab_size": fields["vocab_size"],
        "num_hidden_layers": fields["num_layers"],
        "hidden_size": fields["hidden_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "max_position_embeddings": fields["max_position_embeddings"],
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": bool(fields["tie_word_embeddings"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["rotary_base"])},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if "kv_lora_rank" in fields:
        return DeepseekV3Config(**shared, **_mla_arguments(fields))
    shared |= {name: fields[name] for name in ("num_key_value_heads", "head_dim")}
    if "num_experts" not in fields:
        return Qwen3Config(intermediate_size=fields["intermediate_size"], **shared)
    return Qwen3MoeConfig(
        num_experts=fields["num_experts"],
        num_experts_per_tok=fields["num_experts_per_tok"],
        moe_intermediate_size=fields["moe_intermediate_size"],
        norm_topk_prob=bool(fields["norm_topk_prob"]),
        **shared,
    )


def _save_vision(
    folder: Path, model_type: str, text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> None:
    """Writes a model with images: a decoder, a tiny vision tower and the image processor.

    Args:
        folder: destination of the files.
        model_type: of the family.
        text: the decoder, by the keys of its `config.json`, with `rope_theta`.
        tokenizer: of the model.
        seed: of the weights.
    """
    # Qwen2.5-VL has no separate head width.
    width = int(text["hidden_size"]) // int(text["num_attention_heads"])
    head_dim = width if model_type == "qwen2_5_vl" else int(text.get("head_dim", width))
    family = find_family(model_type).vision
    assert family is not None, "the caller has a model with images"
    # Published models give rows and columns three eighths of the frequencies each, or five sixteenths if interleaved.
    side = 5 * head_dim // 32 if family.interleaved_rotary else 3 * head_dim // 16
    sections = [head_dim // 2 - 2 * side, side, side]
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tokens = zip(_IMAGE_TOKENS, (IMAGE, VIDEO, IMAGE_START, IMAGE_END), strict=True)
    rotary = {"rope_type": "default", "rope_theta": float(text["rope_theta"]), "mrope_section": sections}
    if family.interleaved_rotary:
        rotary["mrope_interleaved"] = True  # transformers does not read it, SGLang does
    scale = {"initializer_range": INITIALIZER_RANGE}
    own = {name: value for name, value in text.items() if name not in ("rope_theta", "tie_word_embeddings")}
    tower = {**TINY_TOWER, **TINY_VISION[f"tiny_{model_type}"], **scale, "out_hidden_size": text["hidden_size"]}
    architecture: PreTrainedConfig = AutoConfig.for_model(
        model_type,
        text_config={**scale, **own, **special, "rope_parameters": rotary},
        vision_config=tower,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens},
        tie_word_embeddings=bool(text["tie_word_embeddings"]),
        dtype="float32",
        **special,
    )
    _save(folder, architecture, tokenizer, seed=seed)
    (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES), encoding="utf-8")


def _mla_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a DeepseekV3Config beyond the shared ones."""
    # Named as in the group `model`; the others are renamed below.
    same_name = (
        "intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    expert_fields = ("num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob")
    return {
        **{
            name: fields[name]
            for name in (*same_name, *expert_fields, "n_group", "topk_group", "routed_scaling_factor")
        },
        "num_key_value_heads": fields["num_attention_heads"],
        "n_routed_experts": fields["num_experts"],
        "n_shared_experts": fields["num_shared_experts"],
        "num_nextn_predict_layers": 0,
    }
