"""Anthropic's Messages: requests, responses and the events of a stream."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlscale.gateway.apis.chat_answer import ChatAnswer, Choice, pieces
from rlscale.gateway.apis.chat_completions import CHANGES_LOGPROBS, list_of, parse_tool_choice
from rlscale.gateway.apis.chat_request import (
    ChatRequest,
    Fields,
    InvalidRequest,
    function_spec,
    shown,
    wrong,
)
from rlscale.gateway.apis.message_content import content_of, is_image, part_of, text_of
from rlscale.renderers.renderer import Message, ToolCall, ToolSpec

INVALID_ARGUMENTS = "_invalid_arguments"
"""Name of the only input of a tool call whose arguments are no JSON object, which this API cannot express."""


def parse_anthropic(body: Any, *, is_count: bool = False) -> ChatRequest:
    """The request in a body of `/v1/messages`, or of `/v1/messages/count_tokens`.

    Raises:
        InvalidRequest: it is invalid, or cannot be recorded exactly.
    """
    fields = Fields(body)
    messages = _parse_messages(fields.require("messages"))
    if system := text_of(fields.get("system"), "system"):
        messages.insert(0, {"role": "system", "content": system})
    tools = [_parse_tool(each, f"tools[{number}]") for number, each in enumerate(list_of(fields, "tools"))]
    # Only this API requires a limit.
    if not is_count:
        fields.require("max_tokens")
    _check_parameters(fields)
    uses_tools = parse_tool_choice(fields, ("none",), ("auto",))
    sampling = {
        "temperature": fields.number("temperature", low=0, high=1),
        "top_p": fields.number("top_p", low=0, high=1),
        "top_k": fields.integer("top_k", low=0),
    }
    request = ChatRequest(
        messages=tuple(messages),
        tools=tuple(tools) if uses_tools else (),
        max_tokens=fields.integer("max_tokens", low=1),
        stop=fields.strings("stop_sequences"),
        stream=fields.flag("stream"),
        model=fields.text("model") or "",
        sampling={name: value for name, value in sampling.items() if value is not None},
        ignored=tuple(fields.ignored),
    )
    fields.finish()
    return request


def parse_anthropic_count(body: Any) -> ChatRequest:
    return parse_anthropic(body, is_count=True)


def _check_parameters(fields: Fields) -> None:
    """Refuses or reports what this server does not do."""
    for name in ("container", "mcp_servers", "context_management", "prefill"):
        fields.refuse(name, (None, []), "this server does not have it")
    output = fields.mapping("output_config")
    if output.get("format") is not None:
        raise InvalidRequest(
            f"output_config.format cannot be used here; a grammar masks tokens, so {CHANGES_LOGPROBS}",
            param="output_config.format",
        )
    if output:
        fields.ignored.append("output_config")
    if fields.mapping("thinking").get("type") not in (None, "disabled"):
        fields.ignored.append("thinking")
    fields.accept("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics")
    fields.accept("user_profile_id", "workspace_id", "betas")


def _parse_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "be a list of at least one message", value)
    messages: list[Message] = []
    for number, each in enumerate(value):
        place = f"messages[{number}]"
        if not isinstance(each, dict) or each.get("role") not in ("user", "assistant", "system"):
            raise wrong(place, "be a message of the role user or assistant", each)
        content = each.get("content")
        if isinstance(content, str) or each["role"] == "system":
            messages.append({"role": each["role"], "content": text_of(content, f"{place}.content")})
        elif not isinstance(content, list):
            raise wrong(f"{place}.content", "be a string or a list of blocks", content)
        elif each["role"] == "assistant":
            messages.append(_parse_answer(content, f"{place}.content"))
        else:
            messages += _parse_user(content, f"{place}.content")
    return messages


def _parse_user(blocks: list[Any], place: str) -> Iterator[Message]:
    """A message for each result of a tool, and one for the texts and images between them."""
    parts: list[dict[str, str]] = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            # Results may come before and after text; the order is kept.
            if parts:
                yield {"role": "user", "content": _joined(parts)}
                parts = []
            if not isinstance(block.get("tool_use_id"), str):
                raise wrong(f"{where}.tool_use_id", "be a string", block.get("tool_use_id"))
            content = content_of(block.get("content"), f"{where}.content")
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
        else:
            parts.append(part_of(block, where))
    if parts or not blocks:
        yield {"role": "user", "content": _joined(parts)}


def _joined(parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A content without images is one text."""
    return parts if any(map(is_image, parts)) else "".join(part["text"] for part in parts)


def _parse_answer(blocks: list[Any], place: str) -> Message:
    texts, calls, thoughts = [], [], []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(_parse_call(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(text_of([block], where.rpartition("[")[0]))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _parse_call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name, kind in (("id", str), ("name", str), ("input", dict)):
        if not isinstance(block.get(name), kind):
            raise wrong(f"{place}.{name}", f"be {'a string' if kind is str else 'a JSON object'}", block.get(name))
    given = block["input"]
    # What `_arguments` wrote, back to what the model wrote.
    raw = given.get(INVALID_ARGUMENTS)
    arguments = raw if list(given) == [INVALID_ARGUMENTS] and isinstance(raw, str) else json.dumps(given)
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _parse_tool(value: Any, place: str) -> ToolSpec:
    if not isinstance(value, dict) or value.get("type") not in (None, "custom"):
        raise InvalidRequest(f"{place} must be a tool with an input_schema, got {shown(value)}", param=place)
    return function_spec(value.get("name"), value.get("description"), value.get("input_schema"), place)


def anthropic_response(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The JSON of `/v1/messages`."""
    (choice,) = answer.choices
    return {
        **_message(answer),
        "content": _blocks(choice),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stop,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled},
    }


def anthropic_events(request: ChatRequest, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    (choice,) = answer.choices
    begin = {
        **_message(answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": begin}
    for index, block in enumerate(_blocks(choice)):
        empty, deltas = _deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.num_sampled}}
    yield {"type": "message_stop"}


def _message(answer: ChatAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.key}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    parsed = choice.answer
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    # Clients expect a block, even an empty one.
    if parsed.content or not parsed.tool_calls:
        blocks.append({"type": "text", "text": parsed.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)} for call in parsed.tool_calls
    ]
    return blocks


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_ARGUMENTS: call.arguments}


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its contents, and the contents in pieces."""
    if block["type"] == "tool_use":
        parts = pieces(json.dumps(block["input"]))
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": each} for each in parts]
    if block["type"] == "thinking":
        parts = pieces(block["thinking"])
        deltas = [{"type": "thinking_delta", "thinking": each} for each in parts]
        return {**block, "thinking": ""}, [*deltas, {"type": "signature_delta", "signature": ""}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": each} for each in pieces(block["text"])]


def _stop_reason(choice: Choice) -> str:
    if choice.is_cut:
        return "max_tokens"
    if choice.answer.tool_calls:
        return "tool_use"
    return "end_turn" if choice.stop is None else "stop_sequence"
