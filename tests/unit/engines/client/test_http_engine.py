"""The client against the fake engine: checks, retries and errors."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest

from rlscale.engines.client import http_connection
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer, fake_routes, fake_token
from rlscale.errors import EngineError
from rlscale.expert_routes import RouteShape
from rlscale.types import EngineAddress, SamplingParams

PROMPT = [5, 9, 33]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, sampling_seed=3)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(vocab_size=100, max_context_len=256) as server:
        yield server


@pytest.fixture
async def engine(fake: FakeServer) -> AsyncIterator[HttpEngine]:
    client = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=5)
    yield client
    await client.close()


SHAPE = RouteShape(num_layers=3, num_chosen=2, num_experts=8)


@pytest.fixture
async def routed() -> AsyncIterator[tuple[FakeServer, HttpEngine]]:
    with FakeServer(vocab_size=100, max_context_len=256, routes=SHAPE) as server:
        client = HttpEngine(EngineAddress(name="engine 0", url=server.url), timeout_s=5)
        yield server, client
        await client.close()


async def test_routes_are_returned_on_request(routed: tuple[FakeServer, HttpEngine]) -> None:
    [plain] = await routed[1].generate(PROMPT, PARAMS)
    assert plain.routes is None
    for answer in await routed[1].generate(PROMPT, replace(PARAMS, routes=SHAPE), n=2):
        expected = fake_routes([*PROMPT, *answer.output_ids][:-1], SHAPE)
        assert answer.routes is not None and answer.routes.dtype == np.uint8 and (answer.routes == expected).all()


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        (replace(SHAPE, num_layers=4), r"routes must be int32 of shape \[8, 4, 2\], got 192 bytes"),
        (replace(SHAPE, num_experts=6), r"routes must be experts from 0 to 5, got 0 to 7"),
    ],
)
async def test_routes_of_another_model_are_refused(
    routed: tuple[FakeServer, HttpEngine], shape: RouteShape, error: str
) -> None:
    with pytest.raises(EngineError, match=f"engine 0 .* must answer as SGLang does, got ValueError: {error}"):
        await routed[1].generate(PROMPT, replace(PARAMS, routes=shape))


async def test_an_answer_without_its_routes_is_an_error(routed: tuple[FakeServer, HttpEngine]) -> None:
    routed[0].faults.drops_routes = True
    with pytest.raises(EngineError, match="must return routed_experts, got none; start SGLang with"):
        await routed[1].generate(PROMPT, replace(PARAMS, routes=SHAPE))


async def wait_until_running(fake: FakeServer) -> None:
    """Returns when the paused server has received a request."""
    while fake.service.load().running == 0:
        await asyncio.sleep(0.01)


async def test_generate(engine: HttpEngine) -> None:
    answers = await engine.generate(PROMPT, PARAMS, n=2)
    for j, answer in enumerate(answers):
        expected = [fake_token(tuple(PROMPT), 3 + j, len(PROMPT) + i, 100) for i in range(6)]
        assert answer.output_ids == [token for token, _ in expected]
        assert answer.logprobs == [logprob for _, logprob in expected]
        assert answer.weight_versions == [0] * 6
        assert answer.finish_reason == "length" and answer.engine == "engine 0"


async def test_info(engine: HttpEngine) -> None:
    info = await engine.info()
    assert info["weight_version"] == 0 and info["vocab_size"] == 100


async def test_many_first_requests_ask_for_the_properties_once(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.info()
    per_call = fake.service.num_descriptions
    answers = await asyncio.gather(*(engine.generate(PROMPT, PARAMS) for _ in range(20)))
    assert len(answers) == 20 and fake.service.num_descriptions == 2 * per_call


async def test_a_cancelled_first_request_does_not_fail_the_others(engine: HttpEngine) -> None:
    first, second = (asyncio.create_task(engine.generate(PROMPT, PARAMS)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert len((await second)[0].output_ids) == 6


@pytest.mark.parametrize("ids", [[5, 100], [-1], []])
async def test_id_outside_the_vocabulary_is_never_sent(fake: FakeServer, engine: HttpEngine, ids: list[int]) -> None:
    with pytest.raises(EngineError, match=r"engine 0 .*input_ids must be token ids below"):
        await engine.generate(ids, PARAMS)
    assert fake.service.num_requests == 0


async def test_dropped_connection_is_retried(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.generate(PROMPT, PARAMS)
    fake.faults.drops_next = 2
    assert len((await engine.generate(PROMPT, PARAMS))[0].output_ids) == 6
    fake.faults.drops_next = 3
    with pytest.raises(EngineError, match=r"engine 0 .*/generate. must answer"):
        await engine.generate(PROMPT, PARAMS)


async def test_error_carries_engine_endpoint_status_and_message(fake: FakeServer, engine: HttpEngine) -> None:
    fake.faults.errors_next = 1
    with pytest.raises(EngineError, match=r"engine 0 .*/generate. refused with status 500: a scripted failure"):
        await engine.generate(PROMPT, PARAMS)


@pytest.mark.slow
async def test_engine_that_does_not_answer_times_out(fake: FakeServer) -> None:
    fake.faults.hangs = True
    engine = HttpEngine(EngineAddress(name="engine 7", url=fake.url), timeout_s=0.3)
    with pytest.raises(EngineError, match=r"engine 7 .*within 0\.3 s"):
        await engine.generate(PROMPT, PARAMS)
    await engine.close()


async def test_unreachable_engine() -> None:
    engine = HttpEngine(EngineAddress(name="engine 0", url="http://127.0.0.1:9"), timeout_s=5)
    assert await engine.health() is False
    with pytest.raises(EngineError, match="engine 0"):
        await engine.generate(PROMPT, PARAMS)
    await engine.close()


@pytest.mark.slow
async def test_a_connection_that_is_not_established_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as busy, socket.socket() as first:
        first.connect(busy.getsockname())  # fills the backlog; the next connection is not accepted
        url = f"http://127.0.0.1:{busy.getsockname()[1]}"
        engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=5)
        with pytest.raises(EngineError, match=r"must accept a connection within 0\.2 s, got none in 3 attempts"):
            await engine.resume()
        await engine.close()


async def test_a_call_that_changes_the_engine_is_sent_once_it_is_connected(
    fake: FakeServer, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, failures = aiohttp.TCPConnector.connect, 2

    async def slow(*args: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise aiohttp.ConnectionTimeoutError
        return await connect(*args, **options)

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", slow)
    await engine.pause("retract")
    task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
    await wait_until_running(fake)
    assert failures == 0 and not task.done(), "the pause has arrived"
    await engine.resume()
    assert len((await task)[0].output_ids) == 6


async def test_abort_pause_and_resume(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.pause("retract")
    task = asyncio.create_task(engine.generate(PROMPT, PARAMS, rid="r"))
    await wait_until_running(fake)
    assert not task.done()
    await engine.abort("r")
    assert (await task)[0].finish_reason == "abort"
    await engine.flush_cache()
    await engine.resume()
    assert len((await engine.generate(PROMPT, PARAMS))[0].output_ids) == 6


async def test_stream_grows_to_the_answer() -> None:
    with FakeServer(token_s=0.01) as slow:
        engine = HttpEngine(EngineAddress(name="engine 0", url=slow.url), timeout_s=5)
        whole = (await engine.generate(PROMPT, PARAMS))[0]
        states = [state async for state in engine.stream(PROMPT, PARAMS)]
        await engine.close()
    assert states[-1] == whole and len(states) > 1
    for state in states[:-1]:
        assert state.finish_reason == "" and state.weight_versions == []
        assert state.output_ids == whole.output_ids[: len(state.output_ids)]
        assert len(state.logprobs) == len(state.output_ids)


async def test_events_longer_than_a_reader_buffers(engine: HttpEngine) -> None:
    params = SamplingParams(max_new_tokens=240, ignore_eos=True, stop=("x" * 100_000,))
    states = [state async for state in engine.stream([5] * 10, params)]
    assert len(states[-1].output_ids) == 240


async def test_closing_a_stream_ends_the_request() -> None:
    with FakeServer(token_s=600) as slow:
        engine = HttpEngine(EngineAddress(name="engine 0", url=slow.url), timeout_s=5)
        stream = engine.stream(PROMPT, SamplingParams(max_new_tokens=200, ignore_eos=True))
        assert len((await anext(stream)).output_ids) >= 1
        await stream.aclose()
        while slow.service.load().running:
            await asyncio.sleep(0.01)
        await engine.close()


async def test_stream_that_fails_names_the_engine(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.generate(PROMPT, PARAMS)
    fake.faults.errors_next = 1
    with pytest.raises(EngineError, match=r"engine 0 .*/generate. refused with status 500: a scripted failure"):
        await anext(engine.stream(PROMPT, PARAMS))
    await engine.release_memory()
    with pytest.raises(EngineError, match=r"engine 0 .*/generate. refused with status 503: .*released"):
        await anext(engine.stream(PROMPT, PARAMS))
    fake.faults.drops_next = 1
    with pytest.raises(EngineError, match=r"engine 0 .*/generate. must stream to the end"):
        await anext(engine.stream(PROMPT, PARAMS))


async def test_memory_is_released_and_resumed(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.generate(PROMPT, PARAMS)
    await engine.release_memory(["kv_cache"])
    with pytest.raises(EngineError, match=r"status 503: .*released"):
        await engine.generate(PROMPT, PARAMS)
    with pytest.raises(EngineError, match="must name what was released"):
        await engine.resume_memory(["weights"])
    await engine.resume_memory(["kv_cache"])
    assert len(await engine.generate(PROMPT, PARAMS)) == 1
    await engine.release_memory()
    await engine.resume_memory()
    with pytest.raises(EngineError, match="no weights yet"):
        await engine.generate(PROMPT, PARAMS)
    await engine.begin_weight_update()
    await engine.end_weight_update(3)
    assert (await engine.generate(PROMPT, PARAMS))[0].weight_versions == [3] * 6


async def test_parameters_reach_the_wire(fake: FakeServer, engine: HttpEngine) -> None:
    plain = (await engine.generate(PROMPT, SamplingParams(max_new_tokens=30, sampling_seed=3, ignore_eos=True)))[0]
    stop = plain.text.split()[4]
    cut = SamplingParams(max_new_tokens=30, sampling_seed=3, ignore_eos=True, stop=(stop,))
    assert (await engine.generate(PROMPT, cut))[0].text == plain.text[: plain.text.find(stop)]
    kept = replace(cut, no_stop_trim=True)
    assert (await engine.generate(PROMPT, kept))[0].text == plain.text[: plain.text.find(stop) + len(stop)]
    # The fake's end token is 1; ids below 2 are special.
    at = next(seed for seed in range(99) if fake_token(tuple(PROMPT), seed, len(PROMPT), 100)[0] == 1)
    short = SamplingParams(max_new_tokens=1, sampling_seed=at, ignore_eos=True)
    assert (await engine.generate(PROMPT, short))[0].text == ""
    assert (await engine.generate(PROMPT, replace(short, skip_special_tokens=False)))[0].text == "1"
    assert (await engine.generate(PROMPT, replace(short, min_new_tokens=1)))[0].output_ids == [2]
    narrow = replace(short, min_p=0.25, spaces_between_special_tokens=False).to_wire()
    assert narrow["min_p"] == 0.25 and narrow["spaces_between_special_tokens"] is False
    assert "min_p" not in short.to_wire()


async def test_refused_flush_is_an_error(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.pause("in_place")
    task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
    await wait_until_running(fake)
    with pytest.raises(EngineError, match="Flush cache failed"):
        await engine.flush_cache()
    await engine.resume()
    await task


@pytest.mark.slow
async def test_memory_is_not_released_during_a_request(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.pause("in_place")
    task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
    await wait_until_running(fake)
    with pytest.raises(EngineError, match="Flush cache failed"):
        await engine.release_memory()
    await engine.resume()
    assert len((await task)[0].output_ids) == 6


async def test_min_p_is_not_sent_if_sglang_draws_by_seed(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.generate(PROMPT, replace(PARAMS, min_p=0.5))
    engine._draws_by_seed = True
    with pytest.raises(EngineError, match=r"min_p must be 0 with SGLang's enable_deterministic_inference, got 0\.5"):
        await engine.generate(PROMPT, replace(PARAMS, min_p=0.5))
    assert fake.service.num_requests == 1


async def test_samples_are_requested_as_a_batch_if_the_server_shares_the_seed(engine: HttpEngine) -> None:
    usual = await engine.generate(PROMPT, PARAMS, n=3, rid="a")
    engine._is_sglang = True
    assert await engine.generate(PROMPT, PARAMS, n=3, rid="b") == usual


def test_one_client_serves_one_loop_after_another(fake: FakeServer) -> None:
    engine = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=5)

    async def once() -> int:
        answers = await engine.generate(PROMPT, PARAMS)
        await engine.close()
        return len(answers)

    assert [asyncio.run(once()), asyncio.run(once())] == [1, 1]


async def test_api_key() -> None:
    with FakeServer(api_key="secret") as fake:
        good = HttpEngine(EngineAddress(name="engine 0", url=fake.url, api_key="secret"), timeout_s=5)
        bad = HttpEngine(EngineAddress(name="engine 1", url=fake.url), timeout_s=5)
        assert len(await good.generate(PROMPT, PARAMS)) == 1
        assert await bad.health() is True
        with pytest.raises(EngineError, match=r"engine 1 .*status 401"):
            await bad.generate(PROMPT, PARAMS)
        await good.close()
        await bad.close()


async def test_closing_while_calls_start_closes_every_session(fake: FakeServer) -> None:
    client = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=5)
    await client.info()
    connection = client._connection
    first = next(iter(connection._sessions.values()))
    closing = first.close

    async def close_while_a_call_starts() -> None:
        connection._session(max_idle_s=99)
        await closing()

    first.close = close_while_a_call_starts  # type: ignore[method-assign]
    await client.close()
    assert first.closed and not connection._sessions
