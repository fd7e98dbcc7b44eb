"""Models with random weights: Qwen3, dense or with experts, and DeepSeek-V3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from rlscale.models.char_tokenizer import character_tokenizer

INITIALIZER_RANGE = 0.05
"""Standard deviation of the random weights. The usual 0.02 is meant for widths in the thousands; with it, at width 128,
supervised training on the arithmetic task takes up to three times as many steps."""


def write_random(folder: Path, *, figures: Mapping[str, Any], init_seed: int) -> None:
    """Writes model and character tokenizer in Hugging Face format into an existing folder.

    Args:
        folder: where the files go.
        figures: the architecture, by the keys of the config group `model`.
        init_seed: seed of the weights; the random state of the caller is not touched.
    """
    tokenizer = character_tokenizer(int(figures["max_position_embeddings"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        architecture = _architecture(figures, tokenizer)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the terminal belongs to the run's own display
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def _architecture(
    figures: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast
) -> Qwen3Config | Qwen3MoeConfig | DeepseekV3Config:
    shared: dict[str, Any] = {
        "vocab_size": figures["vocab_size"],
        "num_hidden_layers": figures["num_layers"],
        "hidden_size": figures["hidden_size"],
        "num_attention_heads": figures["num_attention_heads"],
        "max_position_embeddings": figures["max_position_embeddings"],
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": bool(figures["tie_word_embeddings"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(figures["rotary_base"])},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if "kv_lora_rank" in figures:
        return DeepseekV3Config(**shared, **_latent(figures))
    shared |= {name: figures[name] for name in ("num_key_value_heads", "head_dim")}
    if "num_experts" not in figures:
        return Qwen3Config(intermediate_size=figures["intermediate_size"], **shared)
    return Qwen3MoeConfig(
        num_experts=figures["num_experts"],
        num_experts_per_tok=figures["num_experts_per_tok"],
        moe_intermediate_size=figures["moe_intermediate_size"],
        norm_topk_prob=bool(figures["norm_topk_prob"]),
        **shared,
    )


def _latent(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a DeepseekV3Config: those that are named as in the group `model`, and the others."""
    alike = ("intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    of_experts = ("num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob")
    return {
        **{name: figures[name] for name in (*alike, *of_experts, "n_group", "topk_group", "routed_scaling_factor")},
        "num_key_value_heads": figures["num_attention_heads"],
        "n_routed_experts": figures["num_experts"],
        "n_shared_experts": figures["num_shared_experts"],
        "num_nextn_predict_layers": 0,
    }
