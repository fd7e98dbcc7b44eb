"""Models with random weights: small ones of three families for `model.build`, and any `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.models.transformers_aliases import register_aliases

INITIALIZER_RANGE = 0.05
"""Standard deviation of the random weights. The usual 0.02 suits widths in the thousands; at width 128 supervised
training on the arithmetic task then takes up to three times as many steps."""


def write_random(folder: Path, *, fields: Mapping[str, Any], init_seed: int) -> None:
    """Writes model and character tokenizer in Hugging Face format into an existing folder.

    Args:
        folder: destination of the files.
        fields: the architecture, by the keys of the config group `model`.
        init_seed: seed of the weights; the random state of the caller does not change.
    """
    tokenizer = character_tokenizer(int(fields["max_position_embeddings"]))
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
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    architecture = AutoConfig.for_model(**config_json, **tokens, dtype="float32")
    _save(folder, architecture, tokenizer, seed=seed)


def _save(folder: Path, architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture)  # type: ignore[no-untyped-call]
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
