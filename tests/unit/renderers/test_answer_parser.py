import json

import pytest

from rlscale.models.agent_tokenizer import agent_tokenizer
from rlscale.renderers.answer_parser import FORMATS, AnswerParser
from rlscale.renderers.renderer import ParsedAnswer
from tests.family_tokenizers import family_tokenizer

ADD = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}}}
SAY = {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
NOW = {"name": "now", "parameters": {"properties": {}}}
TOOLS = [{"type": "function", "function": each} for each in (ADD, SAY, NOW)]


def parse(name: str, text: str, *, prompt: str = "") -> ParsedAnswer:
    tokenizer = {"compact": lambda: agent_tokenizer(512), "llama3": lambda: family_tokenizer("llama3")}.get(
        name, lambda: family_tokenizer("qwen")
    )()
    stop = tokenizer.eos_token_id
    parser = AnswerParser(tokenizer, FORMATS[name], stop_ids=(stop,))
    encode = lambda each: tokenizer.encode(each, add_special_tokens=False)  # noqa: E731
    return parser.parse([*encode(text), stop], prompt_ids=encode(prompt), tools=TOOLS)


def called(answer: ParsedAnswer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("compact", "<|call|>add 1 2.5", [("add", {"a": 1, "b": 2.5})]),
        ("compact", "<|call|>add x", [("add", {"a": "x"})]),
        ("compact", "<|call|>say two words", [("say", {"text": "two words"})]),
        ("compact", "<|call|>say ", [("say", {"text": ""})]),
        ("compact", "<|call|>say 7", [("say", {"text": "7"})]),
        ("compact", "<|call|>now", [("now", {})]),
        ("compact", '<|call|>say{"text": "{}"}<|call|>now', [("say", {"text": "{}"}), ("now", {})]),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [("add", {"a": 1})]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", '<|python_tag|>{"name": "now"}', [("now", {})]),
        ("glm4", 'add\n{"a": 1}', [("add", {"a": 1})]),
    ],
)
def test_calls(name: str, text: str, expected: list[tuple[str, object]]) -> None:
    answer = parse(name, text)
    assert (called(answer), answer.content, answer.error) == (expected, "", None)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("compact", "<|call|>", "it has no name"),
        ("compact", "<|call|>sub 1", "there is no tool 'sub'"),
        ("compact", "<|call|>now 1", "now has no parameters"),
        ("compact", "<|call|>add{1", "its JSON is invalid"),
        ("compact", '<|call|>say{"text": "\\ud800"}', "half of a surrogate pair"),
        ("compact", "<|call|>add 1e999 NaN", "not JSON compliant"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not JSON compliant"),
        ("hermes", '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>', "half of a surrogate pair"),
        ("compact", '<|call|>add{"a":' + "[" * 5_000, "maximum recursion"),
        ("hermes", "<tool_call>{}</tool_call>", "it has no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 1}</tool_call>', "no object"),
        ("hermes", '<tool_call>{"name": "add"}', "it has no </tool_call>"),
        ("llama3", '{"name": 1}', "it has no name"),
    ],
)
def test_a_call_that_cannot_be_parsed_stays_in_the_content(name: str, text: str, error: str) -> None:
    answer = parse(name, f"{text}")
    assert answer.tool_calls == () and answer.content == text and error in str(answer.error)


def test_a_wrong_call_does_not_hide_the_others() -> None:
    answer = parse("compact", "so<|call|>add 1 2<|call|>nothing 1<|call|>now")
    assert called(answer) == [("add", {"a": 1, "b": 2}), ("now", {})]
    assert answer.content == "so<|call|>nothing 1" and "nothing" in str(answer.error)


@pytest.mark.parametrize(
    ("name", "text", "prompt", "reasoning", "content"),
    [
        ("hermes", "<think>\nhm\n</think>\n\nso", "", "hm", "so"),
        ("hermes", "hm</think>so", "x<think>\n", "hm", "so"),
        ("hermes", "hm", "x<think>\n", "hm", ""),
        ("hermes", "<think>hm", "", "hm", ""),
        ("hermes", "so <think>late</think>", "", None, "so <think>late</think>"),
        ("hermes", "\nso\n", "", None, "\nso\n"),
        ("compact", "<|think|> hm\n<|/think|>\nso", "", " hm\n", "\nso"),
        ("llama3", "no call {", "", None, "no call {"),
        ("glm4", "two\nlines", "", None, "two\nlines"),
        ("plain", "<think>hm</think>so", "", "hm", "so"),
    ],
)
def test_reasoning_and_content(name: str, text: str, prompt: str, reasoning: str | None, content: str) -> None:
    answer = parse(name, text, prompt=prompt)
    assert (answer.reasoning, answer.content, answer.tool_calls, answer.error) == (reasoning, content, (), None)


def test_a_marker_in_letters_is_no_marker() -> None:
    tokenizer = agent_tokenizer(512)
    letters = [tokenizer.convert_tokens_to_ids(each) for each in "<|call|>now"]
    answer = AnswerParser(tokenizer, FORMATS["compact"], stop_ids=(1,)).parse(letters, tools=TOOLS)
    assert answer == ParsedAnswer(content="<|call|>now")


@pytest.mark.parametrize("marker", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
def test_an_answer_of_markers_only_is_parsed(marker: str) -> None:
    tokenizer = agent_tokenizer(512)
    assert marker not in tokenizer.get_vocab(), "it is found in the text"
    parser = AnswerParser(tokenizer, FORMATS["hermes"], stop_ids=())
    answer = parser.parse(tokenizer.encode(marker * 1500, add_special_tokens=False), tools=TOOLS)
    assert not answer.tool_calls and (answer.error is None) == (marker != "<tool_call>")
