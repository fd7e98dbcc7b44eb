"""OpenAI's Responses: requests, responses and the events of a stream."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlscale.gateway.apis.chat_answer import ChatAnswer, Choice, pieces, token_logprobs
from rlscale.gateway.apis.chat_completions import (
    CHANGES_LOGPROBS,
    TEXT_FORMAT,
    accept_labels,
    list_of,
    parse_sampling,
    parse_tool_choice,
)
from rlscale.gateway.apis.chat_request import (
    ChatRequest,
    Fields,
    InvalidRequest,
    function_spec,
    shown,
    wrong,
)
from rlscale.gateway.apis.message_content import content_of, text_of
from rlscale.renderers.renderer import Message, ToolSpec

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "tool_choice", "tools")


def parse_responses(body: Any) -> ChatRequest:
    """The request in a body of `/v1/responses`.

    Raises:
        InvalidRequest: it is invalid, or cannot be recorded exactly.
    """
    fields = Fields(body)
    given = fields.require("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else parse_items(given, "input")
    instructions = fields.text("instructions")
    # They hold for this response only, so they are no part of the conversation.
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    tools = [_parse_tool(each, f"tools[{number}]") for number, each in enumerate(list_of(fields, "tools"))]
    _check_parameters(fields)
    uses_tools = parse_tool_choice(fields, ("none",), ("auto",))
    accept_labels(fields)
    request = ChatRequest(
        messages=tuple(messages),
        tools=tuple(tools) if uses_tools else (),
        max_tokens=fields.integer("max_output_tokens", low=1),
        stream=fields.flag("stream"),
        logprobs=LOGPROBS in list_of(fields, "include"),
        model=fields.text("model") or "",
        sampling=parse_sampling(fields),
        ignored=tuple(fields.ignored),
        previous_id=fields.text("previous_response_id"),
        has_instructions=bool(instructions),
        echo={name: body[name] for name in ECHOED if name in body},
    )
    fields.finish()
    return request


def _check_parameters(fields: Fields) -> None:
    """Refuses or reports what this server does not do."""
    fields.refuse("background", (None, False), "the answer comes with the response")
    fields.refuse("top_logprobs", (None, 0), "only the logprob of the sampled token is known")
    for name in ("conversation", "prompt", "context_management", "moderation", "image", "background_options"):
        fields.refuse(name, (None,), "this server does not have it; send the messages as input")
    text = fields.mapping("text")
    if text.get("format") not in (None, TEXT_FORMAT):
        raise InvalidRequest(
            f"text.format must be text, got {shown(text['format'])}; a grammar masks tokens, so {CHANGES_LOGPROBS}",
            param="text.format",
        )
    if text.get("verbosity") is not None:
        fields.ignored.append("text.verbosity")
    fields.ignore("reasoning", "max_tool_calls")
    if fields.get("parallel_tool_calls") is False:
        fields.ignored.append("parallel_tool_calls")
    if fields.get("truncation") == "auto":
        fields.ignored.append("truncation")
    fields.accept("stream_options", "access_programs")


def parse_items(value: Any, place: str) -> list[Message]:
    """Input items as messages: reasoning, text and tool calls of one answer are one message."""
    if not isinstance(value, list) or not value:
        raise wrong(place, "be a string or a list of at least one item", value)
    messages: list[dict[str, Any]] = []
    is_open = False  # the last message is an answer that further items may belong to
    for number, item in enumerate(value):
        where = f"{place}[{number}]"
        if not isinstance(item, dict):
            raise wrong(where, "be a JSON object", item)
        part = _parse_item(item, where)
        # Items of two answers never meet: a user's message or a tool's output is between them.
        if part["role"] == "assistant" and is_open and _belongs(messages[-1], part):
            _merge(messages[-1], part)
        else:
            messages.append(part)
        is_open = part["role"] == "assistant"
    return list(messages)


def _belongs(answer: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a part continues an answer: parts come in the order reasoning, text, tool calls."""
    if "tool_calls" in part:
        return True
    has_calls, is_text = "tool_calls" in answer, "content" in part
    return is_text and not has_calls and "content" not in answer


def _merge(answer: dict[str, Any], part: Mapping[str, Any]) -> None:
    calls = [*answer.get("tool_calls", ()), *part.get("tool_calls", ())]
    answer.update(part)
    if calls:
        answer["tool_calls"] = calls


def _parse_item(item: dict[str, Any], place: str) -> dict[str, Any]:
    # Short messages have no type.
    kind = item.get("type", "message")
    if kind == "message":
        return _parse_message(item, place)
    if kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if not isinstance(item.get(name), str):
                raise wrong(f"{place}.{name}", "be a string", item.get(name))
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise wrong(f"{place}.call_id", "be a string", item.get("call_id"))
        output = content_of(item.get("output"), f"{place}.output", TEXT_PARTS)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    if kind == "reasoning":
        texts = [part.get("text", "") for part in item.get("content") or [] if isinstance(part, dict)]
        return {"role": "assistant", "reasoning_content": "".join(map(str, texts))}
    raise InvalidRequest(
        f"{place}.type must be message, function_call, function_call_output or reasoning, got {shown(kind)}",
        param=f"{place}.type",
    )


def _parse_message(item: dict[str, Any], place: str) -> dict[str, Any]:
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ("system", "user", "assistant"):
        raise wrong(f"{place}.role", "be system, developer, user or assistant", item.get("role"))
    read = content_of if role == "user" else text_of
    return {"role": role, "content": read(item.get("content"), f"{place}.content", TEXT_PARTS)}


def _parse_tool(value: Any, place: str) -> ToolSpec:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise InvalidRequest(
            f"{place} must be a tool of type function, got {shown(value)}; others run on no server here", param=place
        )
    return function_spec(value.get("name"), value.get("description"), value.get("parameters"), place)


def responses_response(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The JSON of `/v1/responses`."""
    (choice,) = answer.choices
    return _response(request, answer, output=_items(request, answer, choice), is_done=True)


def responses_events(request: ChatRequest, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    """The events of a stream, numbered from 0."""
    for number, event in enumerate(_events(request, answer)):
        yield {**event, "sequence_number": number}


def _events(request: ChatRequest, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    begin = _response(request, answer, output=[], is_done=False)
    yield {"type": "response.created", "response": begin}
    yield {"type": "response.in_progress", "response": begin}
    (choice,) = answer.choices
    for index, item in enumerate(_items(request, answer, choice)):
        empty = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            empty["arguments"] = ""
        else:
            empty["content"] = []
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield from _item_events(item, {"item_id": item["id"], "output_index": index})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    # An answer that was cut has an end of another name.
    kind = "response.incomplete" if choice.is_cut else "response.completed"
    yield {"type": kind, "response": responses_response(request, answer)}


def _item_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
        return
    part = item["content"][0]
    is_reasoning, place = item["type"] == "reasoning", {**place, "content_index": 0}
    name = "response.reasoning_text" if is_reasoning else "response.output_text"
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    logprobs = part.get("logprobs", [])
    for number, piece in enumerate(pieces(part["text"])):
        # With the first piece: pieces of text are no tokens.
        more = {} if is_reasoning else {"logprobs": [] if number else logprobs}
        yield {"type": f"{name}.delta", **place, "delta": piece, **more}
    yield {"type": f"{name}.done", **place, "text": part["text"], **({} if is_reasoning else {"logprobs": logprobs})}
    yield {"type": "response.content_part.done", **place, "part": part}


def _items(request: ChatRequest, answer: ChatAnswer, choice: Choice) -> list[dict[str, Any]]:
    """The output items of an answer: reasoning, text, tool calls."""
    parsed, key = choice.answer, answer.key
    items: list[dict[str, Any]] = []
    if parsed.reasoning is not None:
        content = [{"type": "reasoning_text", "text": parsed.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{key}", "summary": [], "content": content})
    if parsed.content or not parsed.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": parsed.content, "annotations": []}
        if request.logprobs:
            part["logprobs"] = token_logprobs(choice)
        message = {"type": "message", "id": f"msg_{key}", "role": "assistant", "content": [part]}
        items.append({**message, "status": "incomplete" if choice.is_cut else "completed"})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{key}_{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in enumerate(parsed.tool_calls)
    ]
    return items


def _response(
    request: ChatRequest, answer: ChatAnswer, *, output: list[dict[str, Any]], is_done: bool
) -> dict[str, Any]:
    is_cut = is_done and answer.choices[0].is_cut
    status = ("incomplete" if is_cut else "completed") if is_done else "in_progress"
    response = {
        "id": f"resp_{answer.key}",
        "object": "response",
        "created_at": answer.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": TEXT_FORMAT},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": _usage(answer) if is_done else None,
    }
    return {**response, **{name: value for name, value in request.echo.items() if value is not None}}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
    }
