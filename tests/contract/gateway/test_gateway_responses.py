"""Responses of the gateway with OpenAI's own client."""

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rlscale.gateway.gateway_client import GatewayClient
from tests.gateway_fixtures import LoggedFake, check_exact, open_session

TOOL = {"type": "function", "name": "echo", "parameters": {"type": "object", "properties": {}}, "strict": False}
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def test_a_response_continues_the_one_before_it(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client)
    agent = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    first = await agent.responses.create(
        model="policy", input="hello", instructions="be brief", include=["message.output_text.logprobs"]
    )
    (part,) = first.output[0].content
    assert [each.logprob for each in part.logprobs] == list(fake.entries[0].logprobs)
    second = await agent.responses.create(
        model="policy", input="again", instructions="be brief", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id and second.instructions == "be brief"
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 1
    with pytest.raises(openai.AuthenticationError, match="has ended"):
        await agent.responses.create(model="policy", input="hello")


async def test_a_stream_has_the_order_of_events(client: GatewayClient) -> None:
    session = await open_session(client)
    agent = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    async with agent.responses.stream(model="policy", input="hello") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert list(dict.fromkeys(kinds)) == EVENTS
    other = await open_session(client)
    whole = await AsyncOpenAI(base_url=other.base_url, api_key=other.api_key).responses.create(
        model="policy", input="hello"
    )
    assert final.output_text == whole.output_text and final.usage == whole.usage


async def test_tool_calls_go_both_ways(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client)
    agent = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    items: list[Any] = [{"role": "user", "content": "use a tool"}]
    for _ in range(2):
        async with agent.responses.stream(model="policy", input=items, tools=[TOOL]) as stream:
            answer = await stream.get_final_response()
        (call,) = answer.output
        assert call.type == "function_call" and call.name == "echo"
        given = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        items += [given, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 1


async def test_an_answer_that_was_cut_is_incomplete(client: GatewayClient) -> None:
    session = await open_session(client, ignore_eos=True)
    agent = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    answer = await agent.responses.create(model="policy", input="long", max_output_tokens=4)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"previous_response_id": "resp_other_0"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(client: GatewayClient, change: dict[str, Any], param: str) -> None:
    session = await open_session(client)
    agent = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    with pytest.raises(openai.APIStatusError) as raised:
        await agent.responses.create(**{"model": "policy", "input": "a", **change})
    assert raised.value.param == param and raised.value.status_code in (400, 404)
