"""Chat Completions of the gateway with OpenAI's own client: every token equals the engine's log."""

import asyncio
import os
import signal
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rlscale.gateway.gateway_client import GatewayClient, GatewaySession
from rlscale.gateway.gateway_process import GatewayProcess
from rlscale.types import SampleStatus
from tests.gateway_fixtures import LoggedFake, check_exact, open_session

TOOL = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat_client(session: GatewaySession, *, retries: int = 0) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=retries)


async def test_a_conversation_is_one_path_with_the_tokens_of_the_engine(
    client: GatewayClient, fake: LoggedFake
) -> None:
    session = await open_session(client, temperature=0.8)
    agent, messages = chat_client(session), [{"role": "user", "content": "hello"}]
    for turn in range(3):
        raw = await agent.chat.completions.with_raw_response.create(
            model="policy", messages=messages, temperature=0.1, logprobs=True
        )
        answer = raw.parse().choices[0]
        assert raw.headers["x-rlscale-ignored"] == "temperature"
        assert [each.logprob for each in answer.logprobs.content] == list(fake.entries[-1].logprobs)
        messages += [answer.message.model_dump(exclude_none=True), {"role": "user", "content": f"again {turn}"}]
    assert [model.id async for model in agent.models.list()] == ["policy"]
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 1 and trajectory.status == SampleStatus.completed
    assert {each.temperature for each in fake.entries} == {0.8}, "the run's temperature, not the agent's"
    assert trajectory.metadata["ignored_parameters"] == ["temperature"]


async def test_a_stream_has_the_same_answer(client: GatewayClient) -> None:
    session = await open_session(client)
    agent, messages = chat_client(session), [{"role": "user", "content": "stream"}]
    whole = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=40)
    other = await open_session(client)
    async with chat_client(other).chat.completions.stream(
        model="policy", messages=messages, max_tokens=40, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None and final.usage.completion_tokens == whole.usage.completion_tokens


async def test_tool_calls_go_both_ways(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client)
    agent, messages = chat_client(session), [{"role": "user", "content": "use a tool"}]
    for _ in range(2):
        async with agent.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
            choice = (await stream.get_final_completion()).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "echo"
        called = {
            "id": call.id,
            "type": "function",
            "function": call.function.model_dump(include={"name", "arguments"}),
        }
        messages += [
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 1 and trajectory.metadata["num_forks"] == 0


async def test_n_answers_are_branches(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client)
    answer = await chat_client(session).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "three"}], n=3
    )
    assert len({each.message.content for each in answer.choices}) == 3
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert len(trajectory.samples()) == 3


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages"),
        ({"messages": [{"role": "system", "content": [PICTURE]}]}, "messages[0].content[0].type"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(client: GatewayClient, change: dict[str, Any], param: str) -> None:
    session = await open_session(client)
    request = {"model": "policy", "messages": [{"role": "user", "content": "a"}], **change}
    with pytest.raises(openai.BadRequestError) as raised:
        await chat_client(session).chat.completions.create(**request)
    assert raised.value.param == param and param in raised.value.message


async def test_budgets_end_a_session(client: GatewayClient, fake: LoggedFake) -> None:
    session = await open_session(client, max_new_tokens=5, ignore_eos=True)
    agent, messages = chat_client(session), [{"role": "user", "content": "long"}]
    answer = await agent.chat.completions.create(model="policy", messages=messages)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="5 sampled tokens") as raised:
        await agent.chat.completions.create(model="policy", messages=messages)
    assert raised.value.code == "budget_exhausted"
    trajectory = await client.finish(session.id)
    assert trajectory.num_sampled == 5 and trajectory.status == SampleStatus.truncated

    session = await open_session(client, max_turns=1)
    agent = chat_client(session)
    await agent.chat.completions.create(model="policy", messages=messages)
    with pytest.raises(openai.BadRequestError, match="1 turns"):
        await agent.chat.completions.create(model="policy", messages=messages)


@pytest.mark.parametrize(
    ("limits", "text", "code", "budget"),
    [
        # The gateway believes the context to be longer than the engine does.
        ({"max_context_len": 100_000}, "a" * 5_000, "context_length_exceeded", "max_context_len"),
        ({"max_context_len": 100_000, "max_new_tokens": 50_000}, "a", "context_length_exceeded", "max_context_len"),
        ({"presence_penalty": 0.5}, "a", None, None),
    ],
)
async def test_a_refusal_of_the_engine_is_one_of_the_api(
    client: GatewayClient, fake: LoggedFake, limits: dict[str, Any], text: str, code: str | None, budget: str | None
) -> None:
    """In the form of both vendors, with the engine's message, and without a repetition by their clients."""
    sent = list[str]()

    async def count(request: httpx.Request) -> None:
        sent.append(request.url.path)

    session = await open_session(client, **limits)
    messages: list[Any] = [{"role": "user", "content": text}]
    hooks, reason = {"request": [count]}, r"fit with max_new_tokens into 4096|no penalties"
    counting = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=counting) as agent:
        with pytest.raises(openai.BadRequestError, match=reason) as chat:
            await agent.chat.completions.create(model="policy", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await agent.responses.create(model="policy", input=text)
    assert chat.value.code == code and chat.value.type == "invalid_request_error"
    async with AsyncAnthropic(
        base_url=session.anthropic_url,
        api_key=session.api_key,
        http_client=anthropic.DefaultAsyncHttpxClient(event_hooks=hooks),
    ) as other:
        with pytest.raises(anthropic.BadRequestError, match=reason) as message:
            await other.messages.create(model="policy", messages=messages, max_tokens=5_000)
    assert message.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert sent == ["/v1/chat/completions", "/v1/responses", "/v1/messages"], "each request once"
    trajectory = await client.finish(session.id)
    assert trajectory.metadata.get("exhausted_budget") == budget and not trajectory.turns and not fake.entries
    assert trajectory.status == (SampleStatus.pending if budget is None else SampleStatus.truncated)


async def test_a_killed_gateway_continues_its_sessions(
    client: GatewayClient, gateway: GatewayProcess, fake: LoggedFake
) -> None:
    session = await open_session(client)
    agent, messages = chat_client(session, retries=5), [{"role": "user", "content": "before"}]
    first = await agent.chat.completions.create(model="policy", messages=messages, n=2)
    assert gateway.pid is not None
    os.kill(gateway.pid, signal.SIGKILL)
    restart = asyncio.create_task(asyncio.to_thread(gateway.restart))
    opened = await open_session(client)  # waits for the gateway
    await restart
    # Sent again, as a client does that has lost the connection: answered from the record, and counted once.
    again = await agent.chat.completions.create(
        model="policy", messages=messages, n=2, extra_headers={"x-stainless-retry-count": "1"}
    )
    assert again.model_dump() == first.model_dump()
    messages += [{"role": "assistant", "content": first.choices[1].message.content}, {"role": "user", "content": "b"}]
    await agent.chat.completions.create(model="policy", messages=messages)
    trajectory = await client.finish(session.id)
    check_exact(trajectory, fake)
    assert trajectory.metadata["num_calls"] == 2 and len(trajectory.samples()) == 2
    await client.drop(opened.id)
