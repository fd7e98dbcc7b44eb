"""An abort ends the requests that it names, and no others, on every server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.types import EngineAddress, SamplingParams
from tests.contract.conftest import Target, Wire
from tests.contract.long_request import PROMPT, num_running, start_long


@pytest.fixture
async def client(target: Target) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(EngineAddress(name="engine 0", url=target.url), timeout_s=120)
    yield engine
    await engine.close()


async def wait_for_running(wire: Wire, number: int) -> None:
    async with asyncio.timeout(60):
        while await num_running(wire) < number:
            await asyncio.sleep(0.005)


async def test_an_abort_ends_all_samples_of_a_call_and_no_other_call(client: HttpEngine, wire: Wire) -> None:
    params = SamplingParams(max_new_tokens=wire.target.long_answer, ignore_eos=True, sampling_seed=5)
    before = await num_running(wire)
    first = asyncio.create_task(client.generate(PROMPT, params, n=3, rid="train-1"))
    other = asyncio.create_task(client.generate(PROMPT, params, rid="train-10"))
    await wait_for_running(wire, before + 4)
    await client.abort("train-1")
    answers = await first
    assert [answer.finish_reason for answer in answers] == ["abort"] * 3
    assert all(len(answer.output_ids) < wire.target.long_answer for answer in answers)
    (kept,) = await other
    assert kept.finish_reason == "length" and len(kept.output_ids) == wire.target.long_answer


async def test_a_name_may_be_used_again_while_a_call_with_it_runs(client: HttpEngine, wire: Wire) -> None:
    params = SamplingParams(max_new_tokens=wire.target.long_answer, ignore_eos=True, sampling_seed=5)
    before = await num_running(wire)
    first = asyncio.create_task(client.generate(PROMPT, params, rid="twice"))
    await wait_for_running(wire, before + 1)
    short = SamplingParams(max_new_tokens=2, ignore_eos=True)
    assert len((await client.generate(PROMPT, short, rid="twice"))[0].output_ids) == 2
    await client.abort("twice")
    assert (await first)[0].finish_reason == "abort"


async def test_an_id_aborts_those_that_begin_with_it(wire: Wire) -> None:
    tasks = [await start_long(wire, rid) for rid in ("prefix", "prefix-2")]
    assert (await wire.post("/abort_request", {"rid": "prefi"}))[0] == 200  # no request has this id
    assert (await wire.post("/abort_request", {"rid": "prefix"}))[0] == 200
    for task in tasks:
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
