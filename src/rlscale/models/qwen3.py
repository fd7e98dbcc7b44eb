"""Qwen3 models with random weights, dense or with experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from rlscale.models.characters import character_tokenizer

INITIALIZER_RANGE = 0.05
"""Standard deviation of the random weights. The usual 0.02 is meant for widths in the thousands; with it, at width 128,
supervised training on the arithmetic task takes up to three times as many steps."""


def write_qwen3(folder: Path, *, figures: Mapping[str, int | bool], init_seed: int) -> None:
    """Writes model and character tokenizer in Hugging Face format into an existing folder.

    Args:
        folder: where the files go.
        figures: the architecture, by the keys of the config group `model`.
        init_seed: seed of the weights; the random state of the caller is not touched.
    """
    tokenizer = character_tokenizer(int(figures["max_position_embeddings"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        model = _model(_architecture(figures, tokenizer))
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the terminal belongs to the run's own display
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def _model(architecture: Qwen3Config | Qwen3MoeConfig) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    if isinstance(architecture, Qwen3MoeConfig):
        return Qwen3MoeForCausalLM(architecture)
    return Qwen3ForCausalLM(architecture)


def _architecture(
    figures: Mapping[str, int | bool], tokenizer: PreTrainedTokenizerFast
) -> Qwen3Config | Qwen3MoeConfig:
    shared: dict[str, Any] = {
        "vocab_size": figures["vocab_size"],
        "num_hidden_layers": figures["num_layers"],
        "hidden_size": figures["hidden_size"],
        "num_attention_heads": figures["num_attention_heads"],
        "num_key_value_heads": figures["num_key_value_heads"],
        "head_dim": figures["head_dim"],
        "max_position_embeddings": figures["max_position_embeddings"],
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": bool(figures["tie_word_embeddings"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(figures["rotary_base"])},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if "num_experts" not in figures:
        return Qwen3Config(intermediate_size=figures["intermediate_size"], **shared)
    return Qwen3MoeConfig(
        num_experts=figures["num_experts"],
        num_experts_per_tok=figures["num_experts_per_tok"],
        moe_intermediate_size=figures["moe_intermediate_size"],
        norm_topk_prob=bool(figures["norm_topk_prob"]),
        **shared,
    )
