"""Tokenizer with one token per character, for models built on demand."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<|pad|>", "<|eos|>"
ROLES = ("system", "user", "assistant")
CHARACTERS = "".join(sorted(set(string.printable) - set(string.whitespace))) + " \n"

VOCABULARY = (PAD, EOS, *(f"<|{role}|>" for role in ROLES), *CHARACTERS)
"""Every token; its index is its id."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""One token before each message and one after a response: `<|user|>1+1=<|assistant|>2<|eos|>` has 9 tokens."""


def character_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of all printable ASCII characters, space, line break and the special tokens.

    Encoding fails for any other character: a small model that silently reads an unknown token learns nothing from it.

    Args:
        max_length: maximum sequence length of the model, in tokens.
    """
    # Imported here: code that only needs the vocabulary size must not wait for transformers.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(VOCABULARY[2 : 2 + len(ROLES)]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
