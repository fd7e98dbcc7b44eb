"""Tokenizers and chat templates of the models of `model.build`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.config import ModelBuild
from rlscale.models.agent_tokenizer import (
    AGENT_TEMPLATE,
    AGENT_VOCABULARY,
    VISION_TEMPLATE,
    VISION_VOCABULARY,
    agent_tokenizer,
)
from rlscale.models.char_tokenizer import CHAT_TEMPLATE, EOS, VOCABULARY, character_tokenizer
from rlscale.models.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VISION_BUILDS = (ModelBuild.tiny_qwen2_5_vl, ModelBuild.tiny_qwen3_vl)
_AGENT_BUILDS = (ModelBuild.tiny_qwen3_agent, *VISION_BUILDS)


def tiny_tokenizer(build: str, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a build.

    Args:
        build: of `model.build`.
        max_length: maximum sequence length of the model, in tokens.
    """
    if build in _AGENT_BUILDS:
        return agent_tokenizer(max_length, has_images=build in VISION_BUILDS)
    return character_tokenizer(max_length)


def tiny_vocabulary(build: str) -> tuple[str, ...]:
    """Every token of a build; its index is its id."""
    if build in VISION_BUILDS:
        return VISION_VOCABULARY
    return AGENT_VOCABULARY if build in _AGENT_BUILDS else VOCABULARY


def tiny_chat_template(build: str) -> ChatTemplate:
    """The chat template of a build: that of the agents' models has tools, that of models with images has images."""
    source = VISION_TEMPLATE if build in VISION_BUILDS else AGENT_TEMPLATE if build in _AGENT_BUILDS else CHAT_TEMPLATE
    return ChatTemplate(source=source, tokens={"eos_token": EOS})
