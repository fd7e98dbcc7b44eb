"""Checks of renderers: those of the families pass, and planted faults are found with the token that differs."""

from collections.abc import Sequence
from typing import Any

import pytest

from rlscale.renderers.check_renderer import CHECKS, TemplateVerdict, check_renderer
from rlscale.renderers.families import make_renderer
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer
from rlscale.renderers.template_renderer import TemplateRenderer
from tests.family_tokenizers import TOKENIZERS, family_tokenizer

TYPES = {
    "qwen": "qwen3",
    "forgetful": "qwen3",
    "looks_back": "qwen2",
    "llama3": "llama",
    "glm4": "glm4",
    "glm45": "glm4_moe",
    "deepseek_v3": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "moonlight": "deepseek_v3",
    "glm5": "glm4_moe_lite",
    "minimax_m2": "minimax_m2",
}


class Faulty:
    """A renderer with one fault."""

    def __init__(self, renderer: Renderer, **faults: Any) -> None:
        self._renderer, self._faults = renderer, faults

    def __getattr__(self, name: str) -> Any:
        return self._faults.get(name) or getattr(self._renderer, name)


def verdicts(renderer: Any, tokenizer: Any) -> dict[str, tuple[str, str]]:
    return {each.name: (str(each.verdict), each.detail) for each in check_renderer(renderer, tokenizer)}


def test_every_family_is_listed() -> None:
    assert TYPES.keys() == TOKENIZERS.keys()


@pytest.mark.parametrize("name", TYPES)
def test_no_check_of_a_family_fails(name: str) -> None:
    tokenizer = family_tokenizer(name)
    found = verdicts(make_renderer("auto", tokenizer, model_type=TYPES[name]), tokenizer)
    assert found.keys() == CHECKS.keys()
    assert {check: found[check] for check in found if found[check][0] == TemplateVerdict.failed} == {}
    forks = [check for check in found if found[check][0] == TemplateVerdict.forks]
    assert len(forks) == (4 if name == "looks_back" else 0)


def test_a_changed_id_of_a_bridge_is_shown_with_its_neighbours(agent: TemplateRenderer) -> None:
    def bridge(previous_ids: Sequence[int], new_messages: Sequence[Message], *, tools: Any = ()) -> list[int] | None:
        longer = agent.bridge(previous_ids, new_messages, tools=tools)
        return None if longer is None else [*longer[:9], 50, *longer[10:]]

    verdict, detail = verdicts(Faulty(agent, bridge=bridge), agent._tokenizer)["bridge to a user's message"]
    assert verdict == "failed"
    assert detail == "token 9 after 'What is ': '1' (21) '2+30?<|assistant|>T' became 'N' (50) '2+30?<|assistant|>T'"


def test_a_parser_that_drops_text_is_found(agent: TemplateRenderer) -> None:
    def parse(output_ids: Sequence[int], **others: Any) -> ParsedAnswer:
        return ParsedAnswer(content="It")

    found = verdicts(Faulty(agent, parse=parse), agent._tokenizer)
    assert found["round trip of an answer"][0] == found["round trip of a tool call"][0] == "failed"
    assert "'It is 42, then.<|eos|>' is parsed as" in found["round trip of an answer"][1]


def test_a_stop_id_that_ends_no_answer_is_found(agent: TemplateRenderer) -> None:
    assert verdicts(Faulty(agent, stop_ids=(0,)), agent._tokenizer)["stop ids"][0] == "failed"
    verdict, detail = verdicts(Faulty(agent, stop_ids=(9_999,)), agent._tokenizer)["stop ids"]
    assert (verdict, detail) == ("failed", "the tokenizer has no tokens [9999]")


def test_earlier_answers_that_change_without_a_bridge_fail() -> None:
    tokenizer = family_tokenizer("forgetful")
    renderer = make_renderer("hermes", tokenizer)
    found = verdicts(renderer, tokenizer)["append-only rendering"]
    assert found[0] == "ok" and "a bridge keeps its ids: token" in found[1]
    found = verdicts(Faulty(renderer, bridge=lambda *_, **__: None), tokenizer)["append-only rendering"]
    assert found[0] == "failed" and "'It is 42, t" not in found[1].partition("became")[2]
