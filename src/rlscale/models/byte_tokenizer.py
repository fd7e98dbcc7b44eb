"""Tokenizer with one token per byte of UTF-8, for tiny models that stand in for real ones: it encodes every text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.models.agent_tokenizer import AGENT_TEMPLATE, IMAGE_TOKENS, VISION_TEMPLATE
from rlscale.models.char_tokenizer import EOS, PAD, ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = (PAD, EOS, *(f"<|{role}|>" for role in ROLES))

NUM_TOKENS = len(SPECIAL) + 256
"""261, an odd number: with tensor parallelism Megatron-core has to pad the vocabulary."""


def byte_tokenizer(max_length: int, *, has_images: bool = False) -> PreTrainedTokenizerFast:
    """Builds the tokenizer.

    Args:
        max_length: maximum sequence length of the model, in tokens.
        has_images: with the tokens of images, after all others.
    """
    # Imported here: code that only needs the vocabulary size must not wait for transformers.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel maps each byte to one printable character, so that a vocabulary of these characters has no unknown text.
    images = IMAGE_TOKENS if has_images else ()
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters, *images))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[*SPECIAL[2:], *images],
        chat_template=VISION_TEMPLATE if has_images else AGENT_TEMPLATE,  # agents need one that renders tools
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
