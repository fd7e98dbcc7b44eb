"""Messages of the gateway with Anthropic's own client."""

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from rlscale.gateway.gateway_client import GatewayClient, GatewaySession
from tests.gateway_fixtures import LoggedFake, check_exact, open_session

TOOL = {"name": "echo", "input_schema": {"type": "object", "properties": {}}}
EVENTS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


def messages_client(session: GatewaySession) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=session.anthropic_url, api_key=session.api_key, max_retries=0)


async def test_a_conversation_is_one_path(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client)
    agent, messages = messages_client(session), list[Any]()
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        counted = await agent.messages.count_tokens(model="policy", messages=messages, system="be brief")
        answer = await agent.messages.create(model="policy", max_tokens=100, messages=messages, system="be brief")
        assert answer.usage.input_tokens == counted.input_tokens == len(fake.entries[-1].input_ids)
        messages.append({"role": "assistant", "content": answer.content})
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 1


async def test_a_stream_has_the_order_of_events(client: GatewayClient) -> None:
    session, other = await open_session(client), await open_session(client)
    request: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    stream = await messages_client(session).messages.create(**request, stream=True)
    assert list(dict.fromkeys([event.type async for event in stream])) == EVENTS
    async with messages_client(other).messages.stream(**request) as stream:
        final = await stream.get_final_message()
    again = await open_session(client)
    whole = await messages_client(again).messages.create(**request)
    assert [each.text for each in final.content] == [each.text for each in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason


async def test_tool_calls_go_both_ways(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client)
    agent, messages = messages_client(session), list[Any]([{"role": "user", "content": "use a tool"}])
    for number in range(3):
        request: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": messages, "tools": [TOOL]}
        if number % 2:
            async with agent.messages.stream(**request) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await agent.messages.create(**request)
        (call,) = answer.content
        assert answer.stop_reason == "tool_use" and call.name == "echo" and list(call.input) == ["text"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
        messages += [
            {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [result]},
        ]
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 1


async def test_a_cut_answer_names_its_limit(client: GatewayClient) -> None:
    first = await open_session(client, ignore_eos=True)
    request: dict[str, Any] = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]}
    answer = await messages_client(first).messages.create(**request)
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(client: GatewayClient, change: dict[str, Any], param: str) -> None:
    session = await open_session(client)
    request = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **change}
    with pytest.raises(anthropic.BadRequestError) as raised:
        await messages_client(session).messages.create(**request)
    body = raised.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert param in body["error"]["message"]
