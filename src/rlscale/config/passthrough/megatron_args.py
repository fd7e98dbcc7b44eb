"""Fields of Megatron-core's configs: names and types of the keys `megatron.<field>`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from rlscale.config.passthrough.recorded import LibraryArguments, query_interpreter, read_recorded

RECORDED = Path(__file__).with_name("megatron_arguments.json")
DISTRIBUTION = "megatron-core"
CLASSES = (
    "megatron.core.transformer.transformer_config:MLATransformerConfig",  # TransformerConfig and latent attention
    "megatron.core.optimizer:OptimizerConfig",
)

_NUMBERS = "set train.dtype"
_RATES = "set optim.lr and the other keys of optim"
FROM_MODEL = "remove it: the model's config.json has it"
OF_MODEL = frozenset(
    (
        *("position_embedding_type", "use_rotary_position_embeddings", "no_position_embedding", "use_rope_scaling"),
        *("swiglu", "group_query_attention", "apply_layernorm_1p"),
    )
)
"""Arguments of Megatron-LM that are no fields of Megatron-core's configs, and that the model decides."""

_ROTARY = (
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "rotary_percent",
    "rotary_scaling_factor",
)
RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "set model.num_layers",
        "hidden_size": "set model.hidden_size",
        "ffn_hidden_size": "set model.intermediate_size",
        "num_attention_heads": "set model.num_attention_heads",
        "num_query_groups": "set model.num_key_value_heads",
        "kv_channels": "set model.head_dim",
        "rotary_base": "set model.rotary_base",
        "num_moe_experts": "set model.num_experts",
        "moe_ffn_hidden_size": "set model.moe_intermediate_size",
        "moe_router_topk": "set model.num_experts_per_tok",
        "q_lora_rank": "set model.q_lora_rank",
        "kv_lora_rank": "set model.kv_lora_rank",
        "qk_head_dim": "set model.qk_nope_head_dim",
        "qk_pos_emb_head_dim": "set model.qk_rope_head_dim",
        "v_head_dim": "set model.v_head_dim",
        "moe_enable_routing_replay": "set algo.use_routing_replay or algo.use_rollout_routing_replay",
        **dict.fromkeys(_ROTARY, FROM_MODEL),
        "fp16": _NUMBERS,
        "params_dtype": _NUMBERS,
        "pipeline_dtype": _NUMBERS,
        "autocast_dtype": _NUMBERS,
        "enable_autocast": _NUMBERS,
        "calculate_per_token_loss": "set algo.calculate_per_token_loss",
        "optimizer": "set optim.name",
        "lr": "set optim.lr",
        "min_lr": "set optim.min_lr",
        "decoupled_lr": _RATES,
        "decoupled_min_lr": _RATES,
        "weight_decay": "set optim.weight_decay",
        "adam_beta1": "set optim.adam_beta1",
        "adam_beta2": "set optim.adam_beta2",
        "adam_eps": "set optim.adam_eps",
        "clip_grad": "set optim.clip_grad",
    }
)
"""Fields that rlscale sets, with the key to set instead."""

ABBREVIATIONS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "sp": "sequence_parallel",
    }
)
"""Common abbreviations, alone or followed by `_size`, of Megatron-core's names."""


def load_arguments() -> LibraryArguments:
    """The fields of the installed Megatron-core; those of the tested version when none is installed."""
    known = read_recorded(RECORDED)
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return known
    # The recorded file avoids importing Megatron-core, which takes seconds.
    if version == known.version:
        return known
    try:
        return query_interpreter(Path(sys.executable), version=version, distribution=DISTRIBUTION, classes=CLASSES)
    except (OSError, subprocess.SubprocessError, ValueError):
        return known  # the backend reports an unusable installation when it is used
