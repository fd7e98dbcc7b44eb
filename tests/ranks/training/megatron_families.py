"""Tiny models of every family that Megatron-core trains, as Hugging Face folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.utils import logging

SHARED: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
KIMI_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}
GPT_OSS_ROPE = {**YARN_ROPE, "rope_theta": 150_000.0, "factor": 32.0, "truncate": False}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,  # transformers: width of the rotary part
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
"""Fields of DeepSeek-V3: values are narrower than keys, two of four groups are chosen, one layer has no experts."""

_LITE = ("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}

DELTA: dict[str, Any] = {
    **SHARED,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": PARTIAL_ROPE,
    # The first output of a sample is a value times the product of a query and a key, which may be nearly 0. Its norm
    # would multiply rounding errors, those of transformers included, by up to 1 / sqrt(eps).
    "rms_norm_eps": 1e-2,
}
"""Fields of Qwen3-Next: three value heads share a key head, and are narrower."""

GATED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 24}

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SHARED),
    "qwen3_tied": Qwen3Config(**{**SHARED, "tie_word_embeddings": True}),
    "qwen3_deep": Qwen3Config(**{**SHARED, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3_yarn": Qwen3Config(**SHARED, rope_parameters=YARN_ROPE),
    "qwen3_one_key": Qwen3Config(**{**SHARED, "num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**SHARED),
    "llama": LlamaConfig(**SHARED, rope_parameters=LLAMA3_ROPE),
    "glm4": Glm4Config(**SHARED, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**SHARED, **EXPERTS, norm_topk_prob=True),
    "deepseek_v3": DeepseekV3Config(
        **{**SHARED, **LATENT}, rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "deepseek_v3_plain": DeepseekV3Config(
        **{**SHARED, **LATENT, "q_lora_rank": None, "first_k_dense_replace": 0}, rms_norm_eps=1e-5
    ),
    "kimi_k2": DeepseekV3Config(**{**SHARED, **LATENT, "n_group": 1, "topk_group": 1}, rope_parameters=KIMI_ROPE),
    "qwen3_moe_mixed": Qwen3MoeConfig(**SHARED, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1]),
}


NEWER: dict[str, PreTrainedConfig] = {
    "glm4_moe": Glm4MoeConfig(**SHARED, **SIGMOID, attention_bias=True, use_qk_norm=True),
    "glm4_moe_air": Glm4MoeConfig(**SHARED, **SIGMOID, attention_bias=True, use_qk_norm=False),
    "glm4_moe_lite": Glm4MoeLiteConfig(**{**SHARED, **{n: v for n, v in LATENT.items() if n in _LITE}, **SIGMOID}),
    "moonlight": DeepseekV3Config(
        **{**SHARED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}, rms_norm_eps=1e-5
    ),
    "mimo": Qwen2Config(**SHARED),
    "mistral": MistralConfig(**SHARED, sliding_window=None),
    "mixtral": MixtralConfig(**SHARED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": Qwen2MoeConfig(
        **{name: value for name, value in SHARED.items() if name != "head_dim"},
        **EXPERTS,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[0],
    ),
    "minimax_m2": MiniMaxM2Config(**SHARED, num_local_experts=8, num_experts_per_tok=4, rope_parameters=PARTIAL_ROPE),
    # With random weights of this size the limit clamps about a third of the gates, and samples exceed the window.
    "gpt_oss": GptOssConfig(
        **{**SHARED, "max_position_embeddings": 1024},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=0.5,
        attn_implementation="eager",
        rope_parameters=GPT_OSS_ROPE,
    ),
}
"""Families that `test_megatron_families.py` compares."""

DELTAS: dict[str, PreTrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**DELTA, **GATED_EXPERTS),
    "qwen3_next_mixed": Qwen3NextConfig(
        **{**DELTA, "num_hidden_layers": 4, "layer_types": None}, **GATED_EXPERTS, mlp_only_layers=[1]
    ),
    "qwen3_5": Qwen3_5TextConfig(**DELTA),
    "qwen3_5_one_key": Qwen3_5TextConfig(**{**DELTA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **{name: value for name, value in DELTA.items() if name != "intermediate_size"}, **GATED_EXPERTS
    ),
}
"""Families with gated delta nets, which `test_megatron_delta.py` compares."""

_PUBLISHED = ("qwen3_5",)
"""Models whose folder has the configuration and the names of a published one, which has a vision tower."""

_RENAMED = ("kimi_k2", "mimo")
"""Families with the layers of another one in transformers, and their own `model_type`."""


def write_families(
    root: Path, configs: Mapping[str, PreTrainedConfig] = CONFIGS, *, dtype: torch.dtype = torch.float32
) -> None:
    """Writes one folder per config. All tensors are random, norms and biases included."""
    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(5)
    for name, config in configs.items():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        has_centered_norms = any(config is each for each in DELTAS.values())
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                # Smaller convolutions would leave short keys, whose normalisation multiplies rounding errors.
                scale = 1.0 if "conv1d" in key else 0.1
                noise = torch.randn(parameter.shape, generator=generator) * scale
                # Norms that scale by 1 + weight start at 0, but for that inside of linear attention.
                is_centered = "linear_attn.norm" not in key if has_centered_norms else "norm" not in key
                parameter.copy_(noise if is_centered else noise + 1)
            for key, buffer in model.named_buffers():
                if "bias" in key:
                    # Published checkpoints store it in float32, whatever the dtype of the weights.
                    buffer.data = torch.randn(buffer.shape, generator=generator) * 0.1
        model.save_pretrained(root / name, max_shard_size="40KB" if name == "qwen3" else "1GB")
        if name in _RENAMED:
            file, known = root / name / "config.json", f'"model_type": "{config.model_type}"'
            assert known in file.read_text(), "a renamed family has the layers of another one"
            file.write_text(file.read_text().replace(known, f'"model_type": "{name}"'))
        if name in _PUBLISHED:
            tower = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 32}
            published = Qwen3_5Config(text_config=config.to_dict(), vision_config=tower, dtype="float32")
            published.save_pretrained(root / name)
            file = root / name / "model.safetensors"
            tensors = {re.sub("^model[.]", "model.language_model.", key): x for key, x in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
