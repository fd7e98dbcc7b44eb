"""The limit of what is in flight at an engine."""

import asyncio

import pytest

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.client.in_flight_limit import InFlightLimit
from rlscale.engines.fake import FakeServer
from rlscale.types import EngineAddress, SamplingParams


async def hold(limit: InFlightLimit, num: int, order: list[int], tag: int, gate: asyncio.Event) -> None:
    async with limit.enter(num):
        order.append(tag)
        await gate.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_than_the_limit_and_in_order() -> None:
    limit, order, gate = InFlightLimit(4), [], asyncio.Event()
    sizes = [3, 2, 1, 4, 9]
    tasks = [asyncio.create_task(hold(limit, n, order, i, gate)) for i, n in enumerate(sizes)]
    await turns()
    # The last would fit beside the first, and still it waits for its turn behind the second.
    assert order == [0] and limit.num_in_flight == 3
    gate.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4] and limit.num_in_flight == 0


async def test_one_that_gives_up_leaves_its_place() -> None:
    limit, order, gate = InFlightLimit(2), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(limit, 2, order, i, gate)) for i in range(3)]
    await turns()
    tasks[1].cancel()
    await turns()
    tasks[0].cancel()
    await turns()
    assert order == [0, 2] and limit.num_in_flight == 2
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert limit.num_in_flight == 0


async def test_a_large_one_that_gives_up_lets_smaller_ones_in() -> None:
    limit, order, gate = InFlightLimit(4), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(limit, n, order, i, gate)) for i, n in enumerate([3, 4, 1])]
    await turns()
    assert order == [0]
    tasks[1].cancel()
    await turns()
    assert order == [0, 2] and limit.num_in_flight == 4
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_failure_inside_gives_the_place_back() -> None:
    limit = InFlightLimit(1)
    with pytest.raises(KeyError):
        async with limit.enter(1):
            raise KeyError
    async with limit.enter(1):
        assert limit.num_in_flight == 1


@pytest.mark.parametrize(("most", "together"), [(4, 4), (None, 12)])
async def test_an_engine_never_has_more(most: int | None, together: int) -> None:
    with FakeServer(vocab_size=100, max_context_len=256, token_s=0.01) as fake:
        engine = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=20, max_in_flight=most)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate([5, i], params, n=2)) for i in range(6)]
        seen = []
        while not all(task.done() for task in tasks):
            seen.append(fake.service.load().running)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        await engine.close()
    assert max(seen) == together
