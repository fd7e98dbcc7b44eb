"""The limit of samples in flight at an engine."""

import asyncio

import pytest

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.client.in_flight_limit import InFlightLimit
from rlscale.engines.fake import FakeServer
from rlscale.types import EngineAddress, SamplingParams


async def hold(limit: InFlightLimit, num: int, order: list[int], tag: int, release: asyncio.Event) -> None:
    async with limit.enter(num):
        order.append(tag)
        await release.wait()


async def yield_to_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_admission_up_to_the_limit_and_in_order() -> None:
    limit, order, release = InFlightLimit(4), [], asyncio.Event()
    sizes = [3, 2, 1, 4, 9]
    tasks = [asyncio.create_task(hold(limit, n, order, i, release)) for i, n in enumerate(sizes)]
    await yield_to_tasks()
    # The third would fit next to the first, but it waits behind the second.
    assert order == [0] and limit.num_in_flight == 3
    release.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4] and limit.num_in_flight == 0


async def test_a_cancelled_request_leaves_the_queue() -> None:
    limit, order, release = InFlightLimit(2), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(limit, 2, order, i, release)) for i in range(3)]
    await yield_to_tasks()
    tasks[1].cancel()
    await yield_to_tasks()
    tasks[0].cancel()
    await yield_to_tasks()
    assert order == [0, 2] and limit.num_in_flight == 2
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert limit.num_in_flight == 0


async def test_a_cancelled_large_request_admits_smaller_ones() -> None:
    limit, order, release = InFlightLimit(4), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(limit, n, order, i, release)) for i, n in enumerate([3, 4, 1])]
    await yield_to_tasks()
    assert order == [0]
    tasks[1].cancel()
    await yield_to_tasks()
    assert order == [0, 2] and limit.num_in_flight == 4
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_failed_request_frees_its_samples() -> None:
    limit = InFlightLimit(1)
    with pytest.raises(KeyError):
        async with limit.enter(1):
            raise KeyError
    async with limit.enter(1):
        assert limit.num_in_flight == 1


@pytest.mark.parametrize(("max_in_flight", "expected"), [(4, 4), (None, 12)])
@pytest.mark.slow
async def test_an_engine_never_runs_more_than_the_limit(max_in_flight: int | None, expected: int) -> None:
    with FakeServer(vocab_size=100, max_context_len=256, token_s=0.01) as fake:
        engine = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=20, max_in_flight=max_in_flight)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate([5, i], params, n=2)) for i in range(6)]
        seen = []
        while not all(task.done() for task in tasks):
            seen.append(fake.service.load().running)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        await engine.close()
    assert max(seen) == expected
