"""Tokenizer with one token per byte of UTF-8, for tiny models that stand in for real ones: it encodes every text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.models.char_tokenizer import CHAT_TEMPLATE, EOS, PAD, ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = (PAD, EOS, *(f"<|{role}|>" for role in ROLES))

NUM_TOKENS = len(SPECIAL) + 256
"""261, an odd number: with tensor parallelism Megatron-core has to pad the vocabulary."""


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Builds the tokenizer.

    Args:
        max_length: maximum sequence length of the model, in tokens.
    """
    # Imported here: code that only needs the vocabulary size must not wait for transformers.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel maps each byte to one printable character, so that a vocabulary of these characters has no unknown text.
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
