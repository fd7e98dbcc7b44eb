"""The client against the fake: what it checks, repeats and reports."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from rlscale.engines.fake import FakeServer, fake_token
from rlscale.engines.http import HttpEngine
from rlscale.errors import EngineError
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


@pytest.mark.parametrize("ids", [[5, 100], [-1], []])
async def test_id_outside_the_vocabulary_is_never_sent(fake: FakeServer, engine: HttpEngine, ids: list[int]) -> None:
    with pytest.raises(EngineError, match=r"engine 0 .*input_ids must be token ids below"):
        await engine.generate(ids, PARAMS)
    assert fake.service.num_requests == 0


async def test_dropped_connection_is_tried_again(fake: FakeServer, engine: HttpEngine) -> None:
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


async def test_engine_that_does_not_answer_is_given_up(fake: FakeServer) -> None:
    fake.faults.hangs = True
    engine = HttpEngine(EngineAddress(name="engine 7", url=fake.url), timeout_s=0.3)
    with pytest.raises(EngineError, match=r"engine 7 .*within 0\.3 s"):
        await engine.generate(PROMPT, PARAMS)
    await engine.close()


async def test_engine_that_is_not_there() -> None:
    engine = HttpEngine(EngineAddress(name="engine 0", url="http://127.0.0.1:9"), timeout_s=5)
    assert await engine.health() is False
    with pytest.raises(EngineError, match="engine 0"):
        await engine.generate(PROMPT, PARAMS)
    await engine.close()


async def test_abort_pause_and_resume(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.pause("retract")
    task = asyncio.create_task(engine.generate(PROMPT, PARAMS, rid="r"))
    await asyncio.sleep(0.1)
    assert not task.done()
    await engine.abort("r")
    assert (await task)[0].finish_reason == "abort"
    await engine.flush_cache()
    await engine.resume()
    assert len((await engine.generate(PROMPT, PARAMS))[0].output_ids) == 6


async def test_refused_flush_is_an_error(fake: FakeServer, engine: HttpEngine) -> None:
    await engine.pause("in_place")
    task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
    await asyncio.sleep(0.1)
    with pytest.raises(EngineError, match="Flush cache failed"):
        await engine.flush_cache()
    await engine.resume()
    await task


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
