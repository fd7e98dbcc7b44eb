"""Megatron-core's TransformerConfig for a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from rlscale.architectures.hf_config import figures_of
from rlscale.architectures.megatron_fields import architecture_problems, is_latent, megatron_fields
from rlscale.config import MegatronConfig, ModelConfig
from rlscale.errors import ConfigError
from rlscale.models.kimi import register_kimi
from rlscale.training.megatron.model.mla import latent_sizes
from rlscale.training.megatron.model.rotary import yarn_fields

_FIELDS = frozenset(field.name for field in fields(MLATransformerConfig))

DEFAULTS: Mapping[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",  # the only one for micro-batches that differ in length
    "moe_router_load_balancing_type": "none",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Ours, where `megatron` leaves a field open: losses that balance experts are for pre-training."""

LATENT_DEFAULTS: Mapping[str, Any] = {
    "moe_router_dtype": "fp32",
    "moe_router_bias_update_rate": 0.0,
}
"""Likewise for a model whose experts are chosen with a bias: scores in float32, as transformers and engines have them,
and a bias that stays. To move it balances experts in pre-training; here it would change the policy outside of its loss,
and between the generation of a sample and the step that learns from it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What of a model its layers and names depend on."""

    family: str  # whose weights are named alike, e.g. `qwen3`
    hf_config: PreTrainedConfig
    transformer: TransformerConfig
    is_tied: bool  # the output layer is the embedding
    vocab_size: int  # tokens
    padded_vocab_size: int  # rows of the embedding, over all tensor-parallel ranks


def architecture_of(path: str, *, model: ModelConfig, megatron: MegatronConfig, dtype: torch.dtype) -> Architecture:
    """What Megatron-core is to build for a Hugging Face folder or hub id.

    Args:
        path: folder or hub id; the figures of its config count.
        model: keys that must agree with them, and the padding of the vocabulary.
        megatron: parallel sizes, and further fields of Megatron-core.
        dtype: of parameters and activations.

    Raises:
        ConfigError: with every key that contradicts the config, or what of it Megatron-core does not have.
    """
    register_kimi()
    config = AutoConfig.from_pretrained(path)
    as_json = config.to_dict()
    problems = architecture_problems(as_json, model=model, megatron=megatron)
    if problems:
        raise ConfigError(problems)
    figures, core = figures_of(as_json), _transformer_fields(as_json, megatron=megatron, dtype=dtype)
    if is_latent(as_json):
        transformer = MLATransformerConfig(**{**LATENT_DEFAULTS, **core, **latent_sizes(figures, config)})
    else:
        transformer = TransformerConfig(**core)
        for name, value in yarn_fields(config).items():
            setattr(transformer, name, value)  # no fields of it, but looked for
    vocab_size, parts = int(figures["vocab_size"]), megatron.tensor_model_parallel_size
    padded = model.padded_vocab_size or -(-vocab_size // parts) * parts
    return Architecture(
        family=model.name or config.model_type,
        hf_config=config,
        transformer=transformer,
        is_tied=bool(figures.get("tie_word_embeddings", False)),
        vocab_size=vocab_size,
        padded_vocab_size=padded,
    )


def _transformer_fields(
    config_json: Mapping[str, Any], *, megatron: MegatronConfig, dtype: torch.dtype
) -> dict[str, Any]:
    figures = figures_of(config_json)
    heads = int(figures["num_attention_heads"])
    found = {
        **DEFAULTS,
        "num_layers": figures["num_layers"],
        "hidden_size": figures["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": figures.get("num_key_value_heads", heads),
        "kv_channels": figures.get("head_dim") or figures["hidden_size"] // heads,
        "ffn_hidden_size": figures.get("intermediate_size", figures["hidden_size"]),
        "activation_func": F.silu,
        **megatron_fields(config_json),
        # Every weight is loaded, so memory is left as it comes.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "variable_seq_lengths": megatron.variable_seq_lengths,
        "recompute_granularity": megatron.recompute_granularity and str(megatron.recompute_granularity),
    }
    if figures.get("num_experts"):
        found |= {
            "num_moe_experts": figures["num_experts"],
            "moe_router_topk": figures["num_experts_per_tok"],
            "moe_ffn_hidden_size": figures["moe_intermediate_size"],
        }
    if megatron.core_args.get("virtual_pipeline_model_parallel_size"):
        # Between two stages messages of both directions would else be in one batch, and be taken for each other.
        found |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    found |= {name: value for name, value in megatron.core_args.items() if name in _FIELDS}
    if found["recompute_granularity"] != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            found.pop(name)
    return found


def _leave(weight: Tensor) -> Tensor:
    return weight
