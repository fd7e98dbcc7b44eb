"""Parsers of answers: reasoning, content and tool calls, in the formats that models write.

    ids ── markers ──> text | THINK | text | END_THINK | text | CALL | text | END_CALL ──> ParsedAnswer

A marker that is a single token is found by its id, others in the text. What a model writes is data: nothing of it
is evaluated, and a call that cannot be parsed stays in the content, with the reason in `error`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlscale.renderers.renderer import ParsedAnswer, ToolCall, ToolSpec


class Tokenizer(Protocol):
    """The part of a tokenizer of transformers that renderers use."""

    eos_token_id: Any

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any: ...
    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any: ...


ParseCall = Callable[[str, Sequence[ToolSpec]], ToolCall]
"""Parses the text of one call. Raises ValueError with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """Markers of an answer's parts. None: the model has no such part.

    Example:
        AnswerFormat(think=("<think>", "</think>"), call="<tool_call>", end_call="</tool_call>", parse_call=parse_json)
    """

    think: tuple[str, str] | None = None
    call: str | None = None
    end_call: str | None = None  # None: a call ends at the next one or with the answer
    parse_call: ParseCall | None = None
    whole: bool = False  # a call has no markers: it is the whole content
    strips: bool = True  # the template puts line breaks around the parts


class AnswerParser:
    """Parses the answers of one tokenizer in one format.

    Example:
        AnswerParser(tokenizer, HERMES, stop_ids=(2,)).parse(answer.output_ids)
    """

    def __init__(self, tokenizer: Tokenizer, answer_format: AnswerFormat, *, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._format, self._stop_ids = tokenizer, answer_format, frozenset(stop_ids)
        # Letters that look like a marker are content if the marker is a token.
        vocabulary = tokenizer.get_vocab()
        markers = [*(answer_format.think or ()), answer_format.call, answer_format.end_call]
        names = [marker for marker in markers if marker is not None]
        self._by_id = {vocabulary[name]: name for name in names if name in vocabulary}
        self._by_text = [name for name in names if name not in vocabulary]

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> ParsedAnswer:
        """The message in sampled ids. Never raises for what a model writes."""
        ids = list(output_ids)
        # Several end tokens may follow each other where a request ignores them.
        while ids and ids[-1] in self._stop_ids:
            ids.pop()
        pieces = self._split(ids)
        reasoning, pieces = self._take_reasoning(pieces, opened=self._opens_reasoning(prompt_ids))
        answer = self._take_calls(pieces, tools)
        if self._format.strips and (reasoning is not None or answer.tool_calls):
            reasoning = reasoning if reasoning is None else reasoning.strip("\n")
            answer = replace(answer, content=answer.content.strip("\n"))
        if self._format.whole:
            answer = replace(answer, content=answer.content.removeprefix("\n"))
        return replace(answer, reasoning=reasoning)

    def _split(self, ids: Sequence[int]) -> list[tuple[bool, str]]:
        """The text between markers, and the markers: (is a marker, text)."""
        pieces: list[tuple[bool, str]] = []
        start = 0
        for position, token in enumerate([*ids, None]):
            if token is not None and token not in self._by_id:
                continue
            if start < position:
                pieces += self._split_text(self._tokenizer.decode(ids[start:position], skip_special_tokens=False))
            if token is not None:
                pieces.append((True, self._by_id[token]))
            start = position + 1
        return pieces

    def _split_text(self, text: str) -> list[tuple[bool, str]]:
        if not self._by_text:
            return [(False, text)]
        # A group of a pattern makes `split` return the markers, too, at odd places.
        pieces = re.split(f"({'|'.join(map(re.escape, self._by_text))})", text)
        return [(number % 2 == 1, piece) for number, piece in enumerate(pieces) if piece]

    def _opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends within a reasoning: the template wrote its first marker."""
        if self._format.think is None or not prompt_ids:
            return False
        # The marker and a few line breaks after it.
        end = self._tokenizer.decode(list(prompt_ids[-16:]), skip_special_tokens=False)
        return str(end).rstrip().endswith(self._format.think[0])

    def _take_reasoning(
        self, pieces: list[tuple[bool, str]], *, opened: bool
    ) -> tuple[str | None, list[tuple[bool, str]]]:
        """The reasoning at the start of an answer, and the pieces after it."""
        if self._format.think is None:
            return None, pieces
        begin, end = ((True, marker) for marker in self._format.think)
        if not opened:
            # Only line breaks may stand before it.
            first = next((i for i, (_, text) in enumerate(pieces) if text.strip()), len(pieces))
            if first == len(pieces) or pieces[first] != begin:
                return None, pieces
            pieces = pieces[first + 1 :]
        size = pieces.index(end) if end in pieces else len(pieces)
        return "".join(text for _, text in pieces[:size]), pieces[size + 1 :]

    def _take_calls(self, pieces: list[tuple[bool, str]], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        form = self._format
        if form.parse_call is None:
            return ParsedAnswer(content="".join(text for _, text in pieces))
        if form.whole:
            return _whole_call("".join(text for _, text in pieces), form.parse_call, tools)
        content, calls, error = "", [], None
        index = 0
        while index < len(pieces):
            if pieces[index] != (True, form.call):
                content += pieces[index][1]
                index += 1
                continue
            # The text of the call ends at its end marker or, in formats without one, at the next call.
            ends = {(True, form.call), (True, form.end_call)}
            size = next((i for i, each in enumerate(pieces[index + 1 :]) if each in ends), len(pieces) - index - 1)
            body = "".join(text for _, text in pieces[index + 1 : index + 1 + size])
            after = index + 1 + size
            is_closed = form.end_call is None or pieces[after : after + 1] == [(True, form.end_call)]
            after += is_closed and form.end_call is not None
            try:
                if not is_closed:
                    raise ValueError(f"it has no {form.end_call}")
                calls.append(form.parse_call(body, tools))
            except (ValueError, RecursionError) as problem:
                error = error or f"tool call {body.strip()[:80]!r}: {problem}"
                content += "".join(text for _, text in pieces[index:after])
            index = after
        return ParsedAnswer(content=content, tool_calls=tuple(calls), error=error)


def _whole_call(text: str, parse_call: ParseCall, tools: Sequence[ToolSpec]) -> ParsedAnswer:
    try:
        return ParsedAnswer(content="", tool_calls=(parse_call(text, tools),))
    except (ValueError, RecursionError) as problem:
        # Text that does not begin like a call is an answer without calls.
        is_call = text.lstrip().startswith(("{", "<|python_tag|>"))
        return ParsedAnswer(content=text, error=f"tool call {text.strip()[:80]!r}: {problem}" if is_call else None)


def parse_json_call(text: str, tools: Sequence[ToolSpec]) -> ToolCall:
    """`{"name": ..., "arguments": {...}}`, of Qwen and Hermes; Llama 3 writes `parameters`."""
    value = _json_object(text.strip().removeprefix("<|python_tag|>"))
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    if not isinstance(arguments, Mapping):
        raise ValueError("its arguments are no object")
    return to_call(name, arguments)


def parse_named_call(text: str, tools: Sequence[ToolSpec]) -> ToolCall:
    """The name of a tool in one line, then its arguments as JSON, of GLM-4."""
    name, line_break, arguments = text.strip().partition("\n")
    if not line_break or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise ValueError("it is no name and a line of JSON")
    return to_call(name.strip(), _json_object(arguments))


def parse_compact_call(text: str, tools: Sequence[ToolSpec]) -> ToolCall:
    """`add 1 2`: values in the order of the tool's parameters, the last one to the end; or `add{"a": 1, "b": 2}`."""
    at = min((i for i in (text.find(" "), text.find("{")) if i >= 0), default=len(text))
    name, values_text = text[:at], text[at:]
    if not name:
        raise ValueError("it has no name")
    if not values_text or values_text.startswith("{"):
        return to_call(name, _json_object(values_text or "{}"))
    if values_text.startswith(" {"):
        return to_call(name, _json_object(values_text))
    schema = next((tool["function"] for tool in tools if tool.get("function", {}).get("name") == name), None)
    if schema is None:
        raise ValueError(f"there is no tool {name!r}")
    parameters = (schema.get("parameters") or {}).get("properties") or {}
    if not parameters:
        raise ValueError(f"{name} has no parameters")
    # The last value may contain spaces: it is the remainder of the text.
    values = values_text[1:].split(" ", len(parameters) - 1)
    if len(values) < len((schema.get("parameters") or {}).get("required", ())):
        raise ValueError(f"{name} needs {len(parameters)} values, got {len(values)}")
    typed = {key: _typed(value, parameters[key]) for key, value in zip(parameters, values, strict=False)}
    return to_call(name, typed)


def to_call(name: str, arguments: Mapping[str, Any] | str, *, call_id: str = "") -> ToolCall:
    """A call that every API can send. Raises ValueError for values that JSON or UTF-8 lacks."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= each <= "\udfff" for each in name + text):
        raise ValueError("it has half of a surrogate pair")
    return ToolCall(name=name, arguments=text, id=call_id)


def _typed(text: str, schema: Any) -> Any:
    """A value as its schema says; the text itself where it is no such value: the tool reports it."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if not isinstance(value, dict | list) or kind in ("object", "array", None) else text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise ValueError(f"its JSON is invalid: {problem}") from problem
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


THINK = ("<think>", "</think>")

HERMES = AnswerFormat(think=THINK, call="<tool_call>", end_call="</tool_call>", parse_call=parse_json_call)
COMPACT = AnswerFormat(think=("<|think|>", "<|/think|>"), call="<|call|>", parse_call=parse_compact_call, strips=False)
LLAMA3 = AnswerFormat(parse_call=parse_json_call, whole=True)
GLM4 = AnswerFormat(parse_call=parse_named_call, whole=True)
PLAIN = AnswerFormat(think=THINK)

FORMATS: Mapping[str, AnswerFormat] = {
    "hermes": HERMES,
    "compact": COMPACT,
    "llama3": LLAMA3,
    "glm4": GLM4,
    "plain": PLAIN,
}
"""Name -> format of an answer."""
