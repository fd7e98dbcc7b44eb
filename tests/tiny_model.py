"""Writes random Qwen3 models with a few thousand parameters as Hugging Face folders."""

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
