"""Images in requests of agents: the gateway in front of the embedded engine, and the chat APIs of that engine."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rlscale.agents.run_task import AgentTask
from rlscale.config import ModelBuild
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.gateway.gateway_client import GatewayClient, GatewaySession
from rlscale.gateway.gateway_process import GatewayLaunch, GatewayProcess
from rlscale.images import Image, to_data_url
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Prompt
from tests.gateway_fixtures import params
from tests.scripted_vision import VisionModel, open_vision_model
from tests.tiny_vision import draw, write_tiny_vision

FIRST, SECOND = draw(32, 32, seed=1), draw(32, 32, seed=2)  # of one size: their ids are equal
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_context_len": 256, "max_new_tokens": 60}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model with images, its engine and a gateway."""

    model: VisionModel
    engine: EngineAddress
    gateway: GatewayProcess


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vision")
    path = write_tiny_vision(ModelBuild.tiny_qwen3_vl, folder)
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={path}", f"--port={port}", "--num-threads=1"]
    server = EngineProcess(command, name="engine 0", url=url, env=dict(os.environ), log_path=folder / "server.log")
    codec = {
        "factory": "rlscale.gateway.load_codec:load_codec",
        "arguments": {"model_path": path, "reads_images": True},
    }
    engine = EngineAddress(name="engine 0", url=url)
    launch = GatewayLaunch(folder=folder / "sessions", log_folder=folder, model="policy", codec=codec)
    gateway = GatewayProcess(launch, [engine])
    server.start()
    try:
        gateway.start()
        server.wait_ready(timeout_s=60)
        yield Served(model=open_vision_model(folder), engine=engine, gateway=gateway)
    finally:
        gateway.stop()
        server.stop()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[GatewayClient]:
    client = GatewayClient(served.gateway.address)
    yield client
    await client.close()


async def open_session(client: GatewayClient, prompt: Prompt) -> tuple[Trajectory, GatewaySession]:
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=3)
    return trajectory, await client.open_session(trajectory, params(**GREEDY), lifetime_s=60)


async def own_answer(engine: EngineAddress, ids: Sequence[int], images: Sequence[Image], size: int) -> list[list[Any]]:
    """Logprob and id of each token that the engine itself generates."""
    sampling = {"max_new_tokens": size, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
    body["image_data"] = [image.data_url() for image in images]
    async with aiohttp.ClientSession() as http, http.post(f"{engine.url}/generate", json=body) as got:
        return [entry[:2] for entry in (await got.json())["meta_info"]["output_token_logprobs"]]


async def check_exact(trajectory: Trajectory, engine: EngineAddress) -> None:
    """Compares each sampled turn with what the engine generates from the same ids and images."""
    for number, turn in enumerate(trajectory.turns):
        if turn.sampled:
            before = trajectory.token_ids(number)[: -len(turn.token_ids)]
            own = await own_answer(engine, before, trajectory.images(number), len(turn.token_ids))
            assert turn.token_ids.tolist() == [token for _, token in own]
            assert turn.logprobs.tolist() == pytest.approx([logprob for logprob, _ in own], abs=1e-6)


async def test_images_of_the_row_and_of_the_agent_reach_engine_and_sample(
    served: Served, client: GatewayClient
) -> None:
    trajectory, session = await open_session(client, served.model.prompt(FIRST))
    messages: list[Any] = AgentTask.from_trajectory(trajectory).messages
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as agent:
        for picture in (SECOND, None):
            answer = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            if picture is not None:
                part = {"type": "image_url", "image_url": {"url": to_data_url(picture), "detail": "low"}}
                messages.append({"role": "user", "content": [{"type": "text", "text": "and "}, part]})
                # A restarted gateway reads the pictures of its record.
                os.kill(served.gateway.pid or 0, signal.SIGKILL)
                await asyncio.to_thread(served.gateway.restart)
        messages.append({"role": "user", "content": "sum"})
        await agent.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    found = await client.finish(session.id)
    (sample,) = found.samples()
    assert (found.metadata["num_calls"], found.metadata["num_forks"]) == (3, 0)
    # The messages of the row are its own prompt, whose picture is not sent twice.
    assert found.turns[0].prompt is None and found.turns[0].sampled
    assert [image.data_url() for image in sample.images] == [to_data_url(FIRST), to_data_url(SECOND)]
    placeholder = served.model.images.processor.layout.image_token
    assert (sample.tokens == placeholder).sum() == sum(image.num_tokens for image in sample.images)
    assert sample.loss_mask.sum() == found.num_sampled
    await check_exact(found, served.engine)


async def test_equal_calls_with_different_pictures_are_different_conversations(
    served: Served, client: GatewayClient
) -> None:
    _, session = await open_session(client, served.model.prompt(FIRST))
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as agent:
        for picture in (FIRST, SECOND):
            part = {"type": "input_image", "image_url": to_data_url(picture), "detail": "auto"}
            content = [{"type": "input_text", "text": "What is it?"}, part]
            given: Any = [{"role": "user", "content": content}]
            await agent.responses.create(model="policy", input=given, max_output_tokens=4)
    found = await client.finish(session.id)
    samples = found.samples()
    assert samples[0].tokens[: samples[0].prompt_len].tolist() == samples[1].tokens[: samples[1].prompt_len].tolist()
    assert [[image.data_url() for image in each.images] for each in samples] == [
        [to_data_url(FIRST)],
        [to_data_url(SECOND)],
    ]
    await check_exact(found, served.engine)


async def test_anthropics_client_sends_images_of_users_and_tools(served: Served, client: GatewayClient) -> None:
    _, session = await open_session(client, served.model.prompt())

    def block(content: bytes) -> dict[str, Any]:
        data = to_data_url(content).partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [block(SECOND)]}
    messages: list[Any] = [
        {"role": "user", "content": [block(FIRST), {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with AsyncAnthropic(base_url=session.anthropic_url, api_key=session.api_key, max_retries=0) as agent:
        counted = await agent.messages.count_tokens(model="policy", messages=messages)
        answer = await agent.messages.create(model="policy", messages=messages, max_tokens=4)
        assert counted.input_tokens == answer.usage.input_tokens
    found = await client.finish(session.id)
    (sample,) = found.samples()
    assert [image.data_url() for image in sample.images] == [to_data_url(FIRST), to_data_url(SECOND)]
    await check_exact(found, served.engine)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must have a data URL"),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/1.png"}}, "must have a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "images that can be read"),
        ({"type": "image_url"}, "must have a data URL"),
    ],
)
async def test_a_picture_without_its_bytes_is_refused(
    served: Served, client: GatewayClient, part: dict[str, Any], text: str
) -> None:
    _, session = await open_session(client, served.model.prompt())
    messages: list[Any] = [{"role": "user", "content": [part]}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as agent:
        with pytest.raises(openai.BadRequestError, match=text):
            await agent.chat.completions.create(model="policy", messages=messages)
    await client.drop(session.id)


async def test_the_engine_itself_reads_images_in_chats(served: Served) -> None:
    answers = []
    async with AsyncOpenAI(base_url=f"{served.engine.url}/v1", api_key="none", max_retries=0) as agent:
        for picture in (FIRST, SECOND):
            part = {"type": "image_url", "image_url": {"url": to_data_url(picture)}}
            messages: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": "1+1"}]}]
            chat = await agent.chat.completions.create(
                model="m", messages=messages, max_tokens=6, temperature=0, logprobs=True
            )
            answers.append([each.logprob for each in chat.choices[0].logprobs.content])
    model = served.model
    (image,) = model.prompt(SECOND).images
    parts = [{"type": "image"}, {"type": "text", "text": "1+1"}]
    ids = model.images.processor.layout.expand(
        model.renderer.render([{"role": "user", "content": parts}]), [image.grid]
    )
    own = await own_answer(served.engine, ids, [image], len(answers[1]))
    assert answers[1] == pytest.approx([logprob for logprob, _ in own], abs=1e-6)
    assert answers[0] != pytest.approx(answers[1], abs=1e-4), "the pictures differ"
