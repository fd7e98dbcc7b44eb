"""Renderers of the tiny models and of a ChatML template."""

import pytest

from rlscale.models.agent_tokenizer import agent_tokenizer
from rlscale.renderers.answer_parser import COMPACT, HERMES
from rlscale.renderers.template_renderer import TemplateRenderer
from tests.family_tokenizers import family_tokenizer


@pytest.fixture(scope="session")
def agent() -> TemplateRenderer:
    return TemplateRenderer(agent_tokenizer(4096), COMPACT, name="compact")


@pytest.fixture(scope="session")
def chatml() -> TemplateRenderer:
    return TemplateRenderer(family_tokenizer("qwen"), HERMES, name="chatml")
