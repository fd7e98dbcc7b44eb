"""The gateway in front of the embedded engine, and the chat APIs of that engine itself."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rlscale.config import ModelBuild, ModelConfig, load_config
from rlscale.driver.open_agent_runner import open_admission
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.gateway.gateway_client import GatewayClient
from rlscale.gateway.gateway_process import GatewayLaunch, GatewayProcess
from rlscale.models.tiny import build_model
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress
from tests.gateway_fixtures import new_trajectory, params

KEY = "key-of-the-engine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = ModelConfig(build=ModelBuild.tiny_qwen3_agent, num_key_value_heads=1, head_dim=16, **sizes)
    return build_model(config, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAddress]:
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={model}", f"--port={port}", "--num-threads=1"]
    env, log_path = {**os.environ, "RLSCALE_ENGINE_API_KEY": KEY}, tmp_path_factory.mktemp("engine") / "server.log"
    process = EngineProcess(command, name="engine 0", url=url, env=env, log_path=log_path, api_key=KEY)
    process.start()
    try:
        process.wait_ready(timeout_s=60)
        yield EngineAddress(name="engine 0", url=url, api_key=KEY)
    finally:
        process.stop()


@pytest.fixture(scope="module")
def gateway(model: Path, engine: EngineAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    codec = {"factory": "rlscale.gateway.load_codec:load_codec", "arguments": {"model_path": str(model)}}
    launch = GatewayLaunch(folder=folder / "sessions", log_folder=folder, model="policy", codec=codec)
    process = GatewayProcess(launch, [engine])
    try:
        process.start()
        yield process
    finally:
        process.stop()


async def generate(engine: EngineAddress, ids: list[int], num_tokens: int) -> list[list[float]]:
    """Logprobs and ids of the engine's own answer to the same ids."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{engine.url}/generate", json=body) as got,
    ):
        answer = await got.json()
    return [entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]]


async def test_every_turn_is_what_the_engine_generates_from_the_same_ids(
    gateway: GatewayProcess, engine: EngineAddress
) -> None:
    client = GatewayClient(gateway.address)
    limits: dict[str, Any] = {"temperature": 0.0, "max_context_len": 256, "max_new_tokens": 60}
    session = await client.open_session(new_trajectory(), params(**limits), lifetime_s=60)
    messages: list[Any] = [{"role": "system", "content": "1+1"}, {"role": "user", "content": "12+34="}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as agent:
        for _ in range(3):
            answer = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "5+6="}]
    trajectory = await client.finish(session.id)
    await client.close()
    (sample,) = trajectory.samples()
    assert trajectory.metadata["num_forks"] == 0 and trajectory.metadata["num_calls"] == 3
    for number, turn in enumerate(trajectory.turns):
        if turn.sampled:
            before = trajectory.token_ids(number)[: -len(turn.token_ids)]
            own = await generate(engine, before, len(turn.token_ids))
            assert [[float(logprob), token] for logprob, token in zip(turn.logprobs, turn.token_ids, strict=True)] == [
                [pytest.approx(logprob, abs=1e-6), token] for logprob, token in own
            ]
    assert sample.loss_mask.sum() == trajectory.num_sampled


async def test_the_engine_itself_has_the_chat_apis(engine: EngineAddress) -> None:
    messages: list[Any] = [{"role": "user", "content": "12+34="}]
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key=KEY, max_retries=0) as agent:
        chat = await agent.chat.completions.create(
            model="m", messages=messages, max_tokens=6, temperature=0, logprobs=True, n=2, seed=1
        )
        assert chat.choices[0].message.content == chat.choices[1].message.content, "greedy"
        assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens / 2
        response = await agent.responses.create(model="m", input="12+34=", max_output_tokens=6, temperature=0)
        stream = await agent.responses.create(
            model="m", input="12+34=", max_output_tokens=6, temperature=0, stream=True
        )
        last = [event async for event in stream][-1]
        assert last.type == ("response.incomplete" if response.status == "incomplete" else "response.completed")
        assert chat.choices[0].message.content == response.output_text == last.response.output_text
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await agent.chat.completions.create(model="m", messages=messages, logit_bias={"1": 2})
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await agent.responses.create(model="m", input="1", previous_response_id=response.id)
    async with AsyncAnthropic(base_url=engine.url, api_key=KEY, max_retries=0) as agent:
        counted = await agent.messages.count_tokens(model="m", messages=messages)
        answer = await agent.messages.create(model="m", messages=messages, max_tokens=6, extra_body={"temperature": 0})
    assert counted.input_tokens == answer.usage.input_tokens == chat.usage.prompt_tokens
    assert "".join(block.text for block in answer.content if block.type == "text") == response.output_text
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="wrong", max_retries=0) as agent:
        with pytest.raises(openai.AuthenticationError):
            await agent.chat.completions.create(model="m", messages=messages)


async def test_ten_megabytes_are_refused_without_being_encoded(gateway: GatewayProcess, engine: EngineAddress) -> None:
    """By the gateway and by the server; encoding them takes longer than a client waits here."""
    client = GatewayClient(gateway.address)
    session = await client.open_session(new_trajectory(), params(max_context_len=256), lifetime_s=60)
    messages: list[Any] = [{"role": "user", "content": "1" * 10_000_000}]
    for url, key in ((session.base_url, session.api_key), (f"{engine.url}/v1", KEY)):
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=10) as agent:
            with pytest.raises(openai.BadRequestError, match=r"at most \d+ characters") as refused:
                await agent.chat.completions.create(model="policy", messages=messages)
        assert refused.value.code == "context_length_exceeded"
    trajectory = await client.finish(session.id)
    await client.close()
    assert trajectory.metadata["exhausted_budget"] == "max_context_len" and not trajectory.turns


async def test_agents_are_admitted_by_the_cache_that_the_engine_reports(engine: EngineAddress) -> None:
    client = HttpEngine(engine, timeout_s=60)
    try:
        cache_tokens = (await client.info())["max_total_num_tokens"]
        config = load_config(["experiment=quickstart", "rollout.max_response_len=24"])
        admission = await open_admission(config, cast(EnginePool, SimpleNamespace(present=[client])), is_local=True)
    finally:
        await client.close()
    assert cache_tokens == 64 * 1024, "the slots of the longest requests"
    async with AsyncExitStack() as admitted:
        for _ in range(cache_tokens // 24):
            await admitted.enter_async_context(admission.admit())
        waiting = asyncio.ensure_future(admitted.enter_async_context(admission.admit()))
        await asyncio.sleep(0)
        assert not waiting.done() and admission.num_running == cache_tokens // 24
        waiting.cancel()
