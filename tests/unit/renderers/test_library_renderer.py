import json

import pytest

from rlscale.errors import RenderError
from rlscale.renderers.library_renderer import LibraryRenderer
from tests.family_tokenizers import family_tokenizer, wide

USER = {"role": "user", "content": "1+2="}
TOOL = {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}

ANSWERS = {
    "qwen3": (
        "qwen",
        "<think>\nhm\n</think>\n\nso\n",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    ),
    "glm-4.5": (
        "glm45",
        "<think>hm</think>so",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    "llama-3": ("llama3", "", '{"name": "add", "parameters": {"a": 1}}'),
    "deepseek-v3": (
        "deepseek_v3",
        "so",
        wide(
            "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n"
            '{"a": 1}\n```<|tool_call_end|><|tool_calls_end|>'
        ),
    ),
    "kimi-k2": (
        "kimi_k2",
        "so",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    ),
}
"""Renderer -> its tokenizer, and an answer with reasoning where it has one, and a call."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_with_a_call_is_parsed_and_bridged(name: str) -> None:
    short, before, call = ANSWERS[name]
    tokenizer = family_tokenizer(short)
    renderer = LibraryRenderer(tokenizer, name)
    prompt = renderer.render([USER], tools=[] if name.startswith("deepseek") else [ADD])
    sampled = [*tokenizer.encode(before + call, add_special_tokens=False), renderer.stop_ids[-1]]
    answer = renderer.parse(sampled, prompt_ids=prompt, tools=[ADD])
    assert [(each.name, json.loads(each.arguments)) for each in answer.tool_calls] == [("add", {"a": 1})]
    assert (answer.content, answer.error) == ("so" if "so" in before else "", None)
    assert answer.reasoning == ("hm" if "hm" in before else None)
    for previous in ([*prompt, *sampled], [*prompt, *sampled[:-1]]):
        longer = renderer.bridge(previous, [TOOL], tools=[ADD])
        assert longer is not None and longer[: len(previous)] == previous
        assert "3" in tokenizer.decode(longer[len(previous) :])


def test_a_bridge_keeps_other_tokenizations_and_earlier_reasoning() -> None:
    tokenizer = family_tokenizer("qwen")
    renderer = LibraryRenderer(tokenizer, "qwen3")
    t, h = tokenizer.convert_tokens_to_ids(["t", "h"])
    ids = renderer.render([USER])
    for number in range(4):
        sampled = [*tokenizer.encode(f"<think>{number}</think>"), t, h, renderer.stop_ids[0]]
        before = [*ids, *sampled]
        longer = renderer.bridge(before, [USER])
        assert longer is not None and longer[: len(before)] == before
        ids = longer
    assert tokenizer.decode(ids).count("<think>") == 4


def test_a_wrong_call_is_an_error_and_stays_in_the_content() -> None:
    tokenizer = family_tokenizer("qwen")
    sampled = tokenizer.encode('so<tool_call>{"name"}</tool_call>')
    answer = LibraryRenderer(tokenizer, "qwen3").parse(sampled)
    assert answer.tool_calls == () and '{"name"}' in answer.content and "invalid_json" in str(answer.error)


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e999"])
def test_values_that_no_api_can_send_are_an_error(value: str) -> None:
    tokenizer = family_tokenizer("qwen")
    sampled = tokenizer.encode(f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>')
    answer = LibraryRenderer(tokenizer, "qwen3").parse(sampled)
    assert answer.tool_calls == () and value in answer.content and answer.error is not None


def test_deeply_nested_json_is_an_error() -> None:
    tokenizer = family_tokenizer("qwen")
    sampled = tokenizer.encode('<tool_call>{"name":' + "[" * 100_000 + "</tool_call>")
    answer = LibraryRenderer(tokenizer, "qwen3").parse(sampled)
    assert answer.tool_calls == () and answer.error is not None


def test_a_tokenizer_of_another_family_is_refused() -> None:
    with pytest.raises(RenderError, match="qwen3 does not fit the tokenizer"):
        LibraryRenderer(family_tokenizer("llama3"), "qwen3")


def test_messages_that_a_format_cannot_express_are_named() -> None:
    renderer = LibraryRenderer(family_tokenizer("llama3"), "llama-3")
    with pytest.raises(RenderError, match="the renderer llama-3 cannot render these messages: Cannot place tools"):
        renderer.render([{"role": "system", "content": "x"}], tools=[ADD])
