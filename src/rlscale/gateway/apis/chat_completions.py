"""OpenAI's Chat Completions: requests, responses and the chunks of a stream."""

from collections.abc import Iterator
from typing import Any

from rlscale.gateway.apis.chat_answer import ChatAnswer, Choice, pieces, token_logprobs
from rlscale.gateway.apis.chat_request import (
    MAX_CHOICES,
    ChatRequest,
    Fields,
    InvalidRequest,
    function_spec,
    shown,
    wrong,
)
from rlscale.gateway.apis.message_content import content_of, text_of
from rlscale.renderers.renderer import Message, ToolSpec

CHANGES_LOGPROBS = "the recorded logprobs would not be those of the policy"
NOT_RECORDED = "only texts and images are recorded"
TEXT_FORMAT = {"type": "text"}


def parse_chat(body: Any) -> ChatRequest:
    """The request in a body of `/v1/chat/completions`.

    Raises:
        InvalidRequest: it is invalid, or cannot be recorded exactly.
    """
    fields = Fields(body)
    messages = parse_messages(fields.require("messages"), "messages")
    tools = [_parse_tool(each, f"tools[{number}]") for number, each in enumerate(list_of(fields, "tools"))]
    fields.refuse("logit_bias", (None, {}), CHANGES_LOGPROBS)
    fields.refuse("response_format", (None, TEXT_FORMAT), f"a grammar masks tokens, so {CHANGES_LOGPROBS}")
    fields.refuse("top_logprobs", (None, 0), "only the logprob of the sampled token is known; set logprobs alone")
    fields.refuse("audio", (None,), NOT_RECORDED)
    fields.refuse("modalities", (None, ["text"]), NOT_RECORDED)
    fields.refuse("prediction", (None,), "this server does not use predicted outputs")
    fields.refuse("web_search_options", (None,), "this server has no web search")
    fields.refuse("moderation", (None,), "this server has no moderation")
    for name in ("functions", "function_call"):
        fields.refuse(name, (None, []), "use tools and tool_choice")
    uses_tools = parse_tool_choice(fields, ("none",), ("auto",))
    options = fields.mapping("stream_options")
    # The older name, which many agents use, counts if the newer one is missing.
    limits = [fields.integer(name, low=1) for name in ("max_completion_tokens", "max_tokens")]
    if fields.get("parallel_tool_calls") is False:
        fields.ignored.append("parallel_tool_calls")
    fields.ignore("reasoning_effort", "verbosity")
    accept_labels(fields)
    request = ChatRequest(
        messages=messages,
        tools=tuple(tools) if uses_tools else (),
        n=fields.integer("n", low=1, high=MAX_CHOICES) or 1,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=fields.strings("stop"),
        stream=fields.flag("stream"),
        include_usage=options.get("include_usage") is True,
        logprobs=fields.flag("logprobs"),
        model=fields.text("model") or "",
        sampling=parse_sampling(fields),
        ignored=tuple(fields.ignored),
    )
    fields.finish()
    return request


def parse_sampling(fields: Fields) -> dict[str, Any]:
    """The sampling parameters that a client gave."""
    found = {
        "temperature": fields.number("temperature", low=0, high=2),
        "top_p": fields.number("top_p", low=0, high=1),
        "frequency_penalty": fields.number("frequency_penalty", low=-2, high=2),
        "presence_penalty": fields.number("presence_penalty", low=-2, high=2),
        "seed": fields.integer("seed", low=-(2**63), high=2**63 - 1),
    }
    return {name: value for name, value in found.items() if value is not None}


def parse_tool_choice(fields: Fields, without: tuple[str, ...], free: tuple[str, ...]) -> bool:
    """Whether the model sees the tools. A tool that the model must call is reported as ignored: nothing forces it."""
    choice = fields.get("tool_choice")
    if choice is None:
        return True
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(kind, str):
        raise wrong("tool_choice", "be none, auto, required or a tool", choice)
    if kind not in (*without, *free):
        fields.ignored.append("tool_choice")
    return kind not in without


def accept_labels(fields: Fields) -> None:
    """Accepts parameters that only label or store a request."""
    fields.accept("user", "metadata", "store", "service_tier", "safety_identifier")
    fields.accept("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")


def list_of(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise wrong(name, "be a list", value)
    return value or []


def parse_messages(value: Any, place: str) -> tuple[Message, ...]:
    """Messages with the keys that a renderer reads."""
    if not isinstance(value, list) or not value:
        raise wrong(place, "be a list of at least one message", value)
    return tuple(_parse_message(each, f"{place}[{number}]") for number, each in enumerate(value))


def _parse_message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise wrong(place, "be a JSON object", value)
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise wrong(f"{place}.role", "be system, developer, user, assistant or tool", value.get("role"))
    read = content_of if role in ("user", "tool") else text_of
    message: dict[str, Any] = {"role": role, "content": read(value.get("content"), f"{place}.content")}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    if role == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise wrong(f"{place}.tool_call_id", "be a string", value.get("tool_call_id"))
        message["tool_call_id"] = value["tool_call_id"]
    if role == "assistant":
        _add_assistant_parts(message, value, place)
    return message


def _add_assistant_parts(message: dict[str, Any], value: dict[str, Any], place: str) -> None:
    for name in ("audio", "function_call"):
        if value.get(name) is not None:
            raise InvalidRequest(f"{place}.{name} cannot be used here; remove it", param=f"{place}.{name}")
    # Servers of open models use both names.
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = value.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise wrong(f"{place}.tool_calls", "be a list", calls)
    if calls:
        message["tool_calls"] = [
            _parse_call(each, f"{place}.tool_calls[{number}]") for number, each in enumerate(calls)
        ]


def _parse_call(value: Any, place: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise wrong(f"{place}.function", "be a JSON object", function)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise wrong(f"{place}.function.name", "be a string", name)
    if not isinstance(arguments, str):
        raise wrong(f"{place}.function.arguments", "be a string", arguments)
    call_id = value.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _parse_tool(value: Any, place: str) -> ToolSpec:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(
            f"{place} must be a tool of type function, got {shown(value)}; others run on no server here", param=place
        )
    return function_spec(
        function.get("name"), function.get("description"), function.get("parameters"), f"{place}.function"
    )


def chat_response(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The JSON of `/v1/chat/completions`."""
    return {
        "id": f"chatcmpl-{answer.key}",
        "object": "chat.completion",
        "created": answer.created_s,
        "model": answer.model,
        "choices": [_choice(request, choice, number) for number, choice in enumerate(answer.choices)],
        "usage": _usage(answer),
    }


def chat_chunks(request: ChatRequest, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    """The chunks of a stream: for each choice its role, reasoning, text, tool calls and end; then the usage."""
    frame = {
        "id": f"chatcmpl-{answer.key}",
        "object": "chat.completion.chunk",
        "created": answer.created_s,
        "model": answer.model,
    }
    more: dict[str, Any] = {"usage": None} if request.include_usage else {}
    for number, choice in enumerate(answer.choices):
        logprobs = {"content": token_logprobs(choice), "refusal": None} if request.logprobs else None
        for delta in _deltas(choice):
            entry = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            logprobs = None  # with the first chunk: pieces of text are no tokens
            yield {**frame, "choices": [entry], **more}
        end = {"index": number, "delta": {}, "logprobs": None, "finish_reason": finish_reason(choice)}
        yield {**frame, "choices": [end], **more}
    if request.include_usage:
        yield {**frame, "choices": [], "usage": _usage(answer)}


def finish_reason(choice: Choice) -> str:
    if choice.is_cut:
        return choice.generation.finish_reason  # `abort` is not a word of OpenAI, but that of SGLang and vLLM
    return "tool_calls" if choice.answer.tool_calls else "stop"


def _choice(request: ChatRequest, choice: Choice, number: int) -> dict[str, Any]:
    answer = choice.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        # As OpenAI does: clients tell a pure tool call by it.
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return {
        "index": number,
        "message": message,
        "logprobs": {"content": token_logprobs(choice), "refusal": None} if request.logprobs else None,
        "finish_reason": finish_reason(choice),
    }


def _deltas(choice: Choice) -> Iterator[dict[str, Any]]:
    answer = choice.answer
    yield {"role": "assistant", "content": ""}
    for piece in pieces(answer.reasoning or ""):
        yield {"reasoning_content": piece}
    for piece in pieces(answer.content):
        yield {"content": piece}
    for number, call in enumerate(answer.tool_calls):
        begin = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": number, "id": call.id, "type": "function", "function": begin}]}
        for piece in pieces(call.arguments):
            yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
    }
