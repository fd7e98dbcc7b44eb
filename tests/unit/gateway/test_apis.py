"""Translation between the chat APIs and the one form of requests and answers, without a server."""

import json
from typing import Any

import pytest

from rlscale.gateway.apis.api_errors import anthropic_error, named_event, openai_error
from rlscale.gateway.apis.chat_answer import ChatAnswer, Choice, shown_answer
from rlscale.gateway.apis.chat_completions import chat_chunks, chat_response, parse_chat
from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.apis.dialects import DIALECTS
from rlscale.gateway.apis.messages_api import anthropic_events, anthropic_response, parse_anthropic
from rlscale.gateway.apis.responses_api import parse_responses, responses_events, responses_response
from rlscale.gateway.request_body import parse_json
from rlscale.renderers.conversation_tree import message_key
from rlscale.renderers.renderer import ParsedAnswer, ToolCall
from rlscale.types import Generation

CALL = ToolCall(name="add", arguments='{"a": 1}')
CASES = [
    ParsedAnswer(content="text"),
    ParsedAnswer(content=""),
    ParsedAnswer(content="", tool_calls=(CALL,)),
    ParsedAnswer(content="text", reasoning="because", tool_calls=(CALL, CALL)),
    ParsedAnswer(content="a" * 100, tool_calls=(ToolCall(name="add", arguments="not json"),)),
    ParsedAnswer(content="", tool_calls=(ToolCall(name="add", arguments="[1]"),)),
]


def make_answer(parsed: ParsedAnswer, *, finish: str = "stop", stop: str | None = None) -> ChatAnswer:
    generation = Generation(
        output_ids=[5, 6], logprobs=[-0.5, -0.1], weight_versions=[0, 0], finish_reason=finish, text="", engine="e"
    )
    shown, _ = shown_answer(parsed, key="k")
    choice = Choice(answer=shown, generation=generation, tokens=("x", "y"), stop=stop)
    return ChatAnswer(key="k", created_s=3, model="m", num_prompt_tokens=7, choices=(choice,))


REQUEST = ChatRequest(messages=())


@pytest.mark.parametrize("parsed", CASES)
def test_an_answer_that_comes_back_is_the_same_message(parsed: ParsedAnswer) -> None:
    """By its key, so that the next request continues the path."""
    answer = make_answer(parsed)
    own = message_key(answer.choices[0].answer.to_message())
    question = {"role": "user", "content": "q"}
    chat = chat_response(REQUEST, answer)["choices"][0]["message"]
    assert message_key(parse_chat({"messages": [question, chat]}).messages[1]) == own
    items = responses_response(REQUEST, answer)["output"]
    assert [message_key(each) for each in parse_responses({"input": [question, *items]}).messages[1:]] == [own]
    blocks = anthropic_response(REQUEST, answer)["content"]
    back = parse_anthropic({"messages": [question, {"role": "assistant", "content": blocks}], "max_tokens": 1})
    assert message_key(back.messages[1]) == own


@pytest.mark.parametrize("parsed", CASES)
def test_a_stream_adds_up_to_the_response(parsed: ParsedAnswer) -> None:
    answer = make_answer(parsed)
    message = chat_response(REQUEST, answer)["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chat_chunks(REQUEST, answer)]
    assert "".join(each.get("content") or "" for each in deltas) == (message["content"] or "")
    arguments = [
        call["function"]["arguments"] for each in deltas for call in each.get("tool_calls", ()) if call["index"] == 0
    ]
    assert not parsed.tool_calls or "".join(arguments) == message["tool_calls"][0]["function"]["arguments"]

    events = list(responses_events(REQUEST, answer))
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done == responses_response(REQUEST, answer)["output"]

    parts: dict[int, str] = {}
    for event in anthropic_events(REQUEST, answer):
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            piece = delta.get("text") or delta.get("partial_json") or delta.get("thinking") or ""
            parts[event["index"]] = parts.get(event["index"], "") + piece
    for index, block in enumerate(anthropic_response(REQUEST, answer)["content"]):
        whole = block.get("text", block.get("thinking"))
        assert parts.get(index, "") == (json.dumps(block["input"]) if whole is None else whole)


def test_a_stop_string_is_cut_and_named() -> None:
    shown, stop = shown_answer(ParsedAnswer(content="one.two"), key="k", stop=("two", "."))
    assert (shown.content, stop) == ("one", ".")
    answer = make_answer(shown, stop=stop)
    response = anthropic_response(REQUEST, answer)
    assert (response["stop_reason"], response["stop_sequence"]) == ("stop_sequence", ".")


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_an_answer_that_was_cut_says_so(finish: str) -> None:
    answer = make_answer(ParsedAnswer(content="a", tool_calls=(CALL,)), finish=finish)
    assert chat_response(REQUEST, answer)["choices"][0]["finish_reason"] == finish
    assert anthropic_response(REQUEST, answer)["stop_reason"] == "max_tokens"
    assert responses_response(REQUEST, answer)["status"] == "incomplete"
    assert list(responses_events(REQUEST, answer))[-1]["type"] == "response.incomplete"


def test_results_of_tools_and_text_of_one_message_are_separated() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "3", "is_error": False},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}]},
        {"type": "text", "text": "go"},
        {"type": "text", "text": "on", "cache_control": {"type": "ephemeral"}},
    ]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    request = parse_anthropic(
        {"messages": [{"role": "user", "content": blocks}], "system": system, "max_tokens": 5, "top_k": 3}
    )
    assert [dict(each) for each in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "user", "content": "goon"},
    ]
    assert request.sampling == {"top_k": 3} and request.max_tokens == 5


def test_tools_have_one_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", "description": "adds", "parameters": schema, "strict": True}
    chat = parse_chat(
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": function}]}
    )
    responses = parse_responses({"input": "a", "tools": [{"type": "function", **function}]})
    tool = {"name": "add", "description": "adds", "input_schema": schema}
    messages = parse_anthropic({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [tool]})
    assert chat.tools == responses.tools == messages.tools
    assert chat.tools[0]["function"] == {"name": "add", "description": "adds", "parameters": schema}


@pytest.mark.parametrize(
    ("choice", "num_tools", "ignored"),
    [
        (None, 1, ()),
        ("auto", 1, ()),
        ("none", 0, ()),
        ("required", 1, ("tool_choice",)),
        ({"type": "function", "function": {"name": "add"}}, 1, ("tool_choice",)),
    ],
)
def test_a_tool_that_must_be_called_is_reported_as_ignored(choice: Any, num_tools: int, ignored: tuple[str]) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    request = parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": choice})
    assert len(request.tools) == num_tools and request.ignored == ignored


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "temperature": float("nan")}, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": True}, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 1000}, "n"),
        ({"messages": [{"role": "user", "content": "a"}], "stop": [""]}, "stop"),
        ({"messages": [{"role": "user", "content": "a"}], "stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": "a"}], "logit_bias": 0}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "custom"}]}, "tools[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": "a"}, "messages"),
        ({}, "messages"),
    ],
)
def test_a_wrong_parameter_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_chat(body)
    assert raised.value.param == param and param in str(raised.value)
    assert openai_error(raised.value)["error"]["param"] == param
    assert param in anthropic_error(raised.value)["error"]["message"]


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "another answer"},
    ]
    messages = parse_responses({"input": items}).messages
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert messages[1]["reasoning_content"] == "r" and messages[1]["content"] == "t"
    assert [each["id"] for each in messages[1]["tool_calls"]] == ["c1", "c2"]


def test_events_have_the_form_of_server_sent_events() -> None:
    assert named_event({"type": "a", "text": "x\ny"}) == b'event: a\ndata: {"type": "a", "text": "x\\ny"}\n\n'
    (chat, *_) = [each for each in DIALECTS if each.path == "/v1/chat/completions"]
    assert list(chat.events(REQUEST, make_answer(ParsedAnswer(content="a"))))[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "text",
    [
        r'{"model": "\ud800"}',
        r'{"stop": ["\ud800"]}',
        r'{"messages": [{"role": "assistant", "reasoning_content": "\ud800"}]}',
        r'{"\ud800": 1}',
        '{"metadata": {"a": NaN}}',
        '{"metadata": {"a": -Infinity}}',
        '{"metadata": {"a": 1e400}}',
    ],
)
def test_what_no_answer_could_repeat_is_refused(text: str) -> None:
    raw = text.replace(r"\ud800", "\ud800").encode(errors="surrogatepass")
    for body in (text.encode(), text.encode("utf-16"), raw):
        with pytest.raises(InvalidRequest):
            parse_json(body)


def test_valid_unicode_and_words_of_numbers_are_kept() -> None:
    value = {"stop": "\N{GRINNING FACE}", "a": "NaN 1e999 Infinity", "b": 1e300}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_json(text.encode()) == value
