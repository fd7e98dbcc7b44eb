"""Writes random models with a few thousand parameters as Hugging Face folders."""

import string
from pathlib import Path
from typing import Any

MAX_CONTEXT_LEN = 512
EOS_ID = 1
# Two special tokens, one token per character, and two that only a model generates: no text encodes to them.
TOKENS = ("<|pad|>", "<|eos|>", *sorted(set(string.printable) - set(string.whitespace)), " ", "\n", "qu", "th")
VOCAB_SIZE = len(TOKENS)
FIGURES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_CONTEXT_LEN,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_SIGMOID: dict[str, Any] = {
    "intermediate_size": 160,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
_LATENT: dict[str, Any] = {
    **_SIGMOID,
    "num_key_value_heads": 4,
    "head_dim": 8,  # transformers: width of the rotary part
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    # A norm multiplies rounding errors of outputs near 0, those of transformers included, by up to 1 / sqrt(eps).
    "rms_norm_eps": 1e-2,
}
_GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4": {"intermediate_size": 160, "attention_bias": True},
    "glm4_moe": {**_SIGMOID, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
    # Values are wider than keys, and queries are not compressed.
    "glm4_moe_lite": {**_LATENT, "v_head_dim": 28, "q_lora_rank": None},
    "deepseek_v3": {
        **_LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "kimi_k2": {**_LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    "minimax_m2": {
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    # The limit clamps some of the gates, and prompts exceed the window.
    "gpt_oss": {
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "swiglu_limit": 0.5,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "qwen3_next": {**_DELTA, **_GATED_EXPERTS, "intermediate_size": 160, "mlp_only_layers": [2]},
    "qwen3_5_text": {**_DELTA, "intermediate_size": 160, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {**_DELTA, **_GATED_EXPERTS},
}
"""`model_type` -> fields of a tiny model apart from `FIGURES`."""


def write_tiny(folder: Path, *, family: str, seed: int = 0, **fields: int) -> Path:
    """Writes model and tokenizer of one of `FAMILIES`, with other values of some fields.

    All tensors are random: norms, biases and sinks, too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlscale.models.transformers_aliases import register_aliases

    register_aliases()
    config = AutoConfig.for_model(family, **{**FIGURES, **FAMILIES[family], **fields})
    config._attn_implementation = "eager"  # the others do not know sinks
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() > 1 and not name.endswith("_bias"):
                tensor.mul_(3)
            elif "inv_freq" not in name:
                tensor.normal_(mean=float(name.endswith("norm.weight")), std=0.1)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def write_tiny_qwen3(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Writes model and tokenizer into `folder`. The weights are scaled up, so that the logits are far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(intermediate_size=160, tie_word_embeddings=tied, **FIGURES)
    return _write(folder, Qwen3ForCausalLM, config, seed=seed)


def write_tiny_qwen3_moe(folder: Path, *, seed: int = 0) -> Path:
    """Like `write_tiny_qwen3`, with 4 experts per layer and 2 experts per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, **FIGURES
    )
    return _write(folder, Qwen3MoeForCausalLM, config, seed=seed)


def write_tiny_reward_model(folder: Path, *, family: str = "Qwen3", seed: int = 0) -> Path:
    """Like `write_tiny_qwen3`, with one number for a text, read at its last token, instead of logits."""
    import transformers

    config = getattr(transformers, f"{family}Config")(intermediate_size=160, num_labels=1, **FIGURES)
    return _write(folder, getattr(transformers, f"{family}ForSequenceClassification"), config, seed=seed)


def _write(folder: Path, kind: Any, config: Any, *, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=TOKENS[0], eos_token=TOKENS[EOS_ID], clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
