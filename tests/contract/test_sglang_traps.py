"""Quirks of the real SGLang server, and the client's workarounds."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from rlscale.config.passthrough import sglang_sampling_params
from rlscale.config.passthrough.sglang_args import RECORDED, load_arguments
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError
from rlscale.types import EngineAddress, Generation, SamplingParams
from rlscale.weight_types import WeightGroup
from rlscale.weights.engine_groups import GroupOptions
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from rlscale.weights.torch_groups import open_store
from rlscale.weights.transports.gloo_packed import PackedTransport
from tests.contract.conftest import SGLANG_ARGUMENTS, Target, describe_installed, sglang_launch
from tests.contract.test_engine_contract import BAD_REQUESTS
from tests.tcp_connections import ESTABLISHED, connections_to
from tests.tiny_model import VOCAB_SIZE, write_tiny_qwen3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [5, 9, 33, 7]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, sampling_seed=3)
TIMEOUT_S = 30.0


@pytest.fixture
def address(sglang: Target) -> EngineAddress:
    return EngineAddress(name="engine 0", url=sglang.url)


@pytest.fixture
async def engine(address: EngineAddress) -> AsyncIterator[HttpEngine]:
    client = HttpEngine(address, timeout_s=TIMEOUT_S)
    yield client
    await client.close()


async def test_an_id_outside_the_vocabulary_is_not_sent(engine: HttpEngine) -> None:
    for ids in ([5, VOCAB_SIZE], [-1], []):
        with pytest.raises(EngineError, match="input_ids must be token ids below"):
            await engine.generate(ids, PARAMS)
    assert await engine.health()
    # The last id of the vocabulary is allowed.
    assert len((await engine.generate([VOCAB_SIZE - 1], PARAMS))[0].output_ids) == 6


# Bodies that crash the server, that it answers with 500, and that it accepts.
NOT_REFUSED = (
    {"input_ids": [5, 100_000]},
    {"input_ids": [-1]},
    {"input_ids": [5], "sampling_params": []},
    {"input_ids": [5], "sampling_params": {"n": 0}},
)


async def test_other_errors_are_refused_without_effect(sglang: Target, engine: HttpEngine) -> None:
    bodies = [body for body, _ in BAD_REQUESTS if body not in NOT_REFUSED]
    assert len(bodies) == len(BAD_REQUESTS) - len(NOT_REFUSED)
    async with aiohttp.ClientSession() as session:
        for body in bodies:
            async with session.post(f"{sglang.url}/generate", json=body) as response:
                assert response.status == 400, body
    assert len((await engine.generate(PROMPT, PARAMS))[0].output_ids) == 6


async def test_a_regular_expression_limits_the_answer(engine: HttpEngine) -> None:
    params = replace(PARAMS, ignore_eos=False, others={"regex": "[0-9]{4}"})
    (answer,) = await engine.generate(PROMPT, params)
    assert re.fullmatch("[0-9]{4}", answer.text)


async def test_min_p_with_a_seed_is_not_sent(engine: HttpEngine) -> None:
    with pytest.raises(EngineError, match=r"min_p must be 0 with SGLang's enable_deterministic_inference, got 0\.1"):
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=2, min_p=0.1, sampling_seed=1))
    assert await engine.health()


async def test_each_of_n_samples_has_its_own_seed(engine: HttpEngine) -> None:
    together = await engine.generate(PROMPT, PARAMS, n=3, rid="three")
    alone = [
        (await engine.generate(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True, sampling_seed=3 + j)))[0]
        for j in range(3)
    ]
    assert [a.output_ids for a in together] == [a.output_ids for a in alone]
    assert len({tuple(a.output_ids) for a in together}) == 3


async def test_an_idle_connection_that_was_dropped_is_replaced(engine: HttpEngine) -> None:
    async def many() -> list[list[int]]:
        answers = await asyncio.gather(*(engine.generate([5, i], PARAMS) for i in range(48)))
        return [answer.output_ids for [answer] in answers]

    first = await many()
    # Blocking: the event loop must not notice that SGLang drops all connections, after 5 s without a request.
    while any(each.state == ESTABLISHED for each in connections_to(engine.address.url)):
        time.sleep(0.05)
    assert await many() == first


async def pause_during_request(engine: HttpEngine, sglang: Target) -> asyncio.Task[list[Generation]]:
    """Pauses the server while it holds a request; the task ends with the events of that."""
    long, events = SamplingParams(max_new_tokens=sglang.long_answer, ignore_eos=True), list[Generation]()

    async def read() -> list[Generation]:
        async for event in engine.stream(PROMPT, long):
            events.append(event)
        return events

    for _ in range(10):
        events.clear()
        task = asyncio.create_task(read())
        while not events:  # from the first one on the request is running
            await asyncio.sleep(0.001)
        await engine.pause("in_place")
        await asyncio.sleep(0.5)  # events that were sent before the pause arrive
        if not task.done():
            return task
        await engine.resume()  # the request ended before the pause arrived
    raise AssertionError("every request ended before the server was paused")


async def test_an_update_that_cannot_flush_the_cache_is_an_error(
    engine: HttpEngine, address: EngineAddress, sglang: Target
) -> None:
    version = (await engine.info())["weight_version"]
    folder = Path((await engine.info())["tokenizer_path"])
    task = await pause_during_request(engine, sglang)
    other = HttpEngine(address, timeout_s=TIMEOUT_S)  # it does not know of the pause, and so requests a flush
    try:
        with pytest.raises(EngineError, match=r"engine 0 .*/update_weights_from_disk. refused"):
            await other.update_from_disk(folder, version=version, checksums={})
    finally:
        await other.close()
        await engine.resume()
    assert len((await task)[-1].output_ids) == sglang.long_answer


def test_a_used_group_name_is_refused_in_time(address: EngineAddress) -> None:
    transport = PackedTransport(GroupOptions(bucket_bytes=2**20, timeout_s=TIMEOUT_S))
    channel = WeightSync(
        transport,
        make_engine=lambda a: HttpEngine(a, timeout_s=TIMEOUT_S),
        group=SenderGroup(rank=0),
        timeout_s=TIMEOUT_S,
    )
    channel.connect([address])
    taken = transport.groups.names[0]
    store = open_store("127.0.0.1", timeout_s=5)

    async def join_again() -> None:
        engine = HttpEngine(address, timeout_s=TIMEOUT_S)
        group = WeightGroup(
            name=taken,
            master_address="127.0.0.1",
            master_port=store.port,
            world_size=2,
            backend="gloo",
            timeout_s=5,
        )
        try:
            await engine.join_weight_group(group, 1)
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"engine 0 .*/init_weights_update_group. refused with status 400"):
        asyncio.run(join_again())
    # A new link has a new name, so it never joins an old group.
    channel.connect([address])
    assert transport.groups.names[0] != taken
    channel.close()


@pytest.mark.nightly
def test_the_recorded_arguments_match_the_tested_version() -> None:
    installed, recorded = describe_installed(), json.loads(RECORDED.read_text())
    assert installed == recorded
    assert load_arguments(None).version == recorded["version"]
    assert set(SGLANG_ARGUMENTS) <= installed["types"].keys()


@pytest.mark.nightly
def test_the_recorded_sampling_params_match_the_tested_version() -> None:
    installed = describe_installed(sglang_sampling_params.CLASSES)
    assert installed == json.loads(sglang_sampling_params.RECORDED.read_text())
    known = {*sglang_sampling_params.EMBEDDED, *sglang_sampling_params.CHANGES_DISTRIBUTION, "stop_regex"}
    assert known | sglang_sampling_params.RESERVED.keys() == installed["types"].keys()


async def test_a_prompt_needs_the_spare_tokens(engine: HttpEngine, sglang: Target) -> None:
    longest = sglang.max_context_len - 1 - sglang.spare_tokens
    params = SamplingParams(max_new_tokens=1)
    assert len((await engine.generate([5] * longest, params))[0].output_ids) == 1
    with pytest.raises(EngineError, match="exceeds the maximum allowed length"):
        await engine.generate([5] * (longest + 1), params)


def test_the_error_for_a_server_that_cannot_start_has_its_log(tmp_path: Path) -> None:
    model = write_tiny_qwen3(tmp_path / "model")
    (model / "config.json").write_text("{}")
    _, process = sglang_launch(model).open(tmp_path)
    process.start()
    try:
        with pytest.raises(EngineError, match=r"(?s)engine 0 ended with status \d+; log: .*Error"):
            process.wait_ready(timeout_s=120)
    finally:
        process.stop()
