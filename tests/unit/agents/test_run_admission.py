import asyncio

import pytest

from rlscale.agents.run_admission import AgentAdmission

_running: list[asyncio.Future[None]] = []


async def running(admission: AgentAdmission, number: int, *, tokens: int = 0) -> tuple[list[int], list[asyncio.Event]]:
    """Starts agents that end at their events; returns those that were admitted, as the list grows."""
    admitted: list[int] = []
    ends = [asyncio.Event() for _ in range(number)]

    async def agent(i: int) -> None:
        async with admission.admit() as own:
            admitted.append(i)
            await ends[i].wait()
            own.num_tokens = tokens

    _running.extend(asyncio.ensure_future(agent(i)) for i in range(number))
    await settled()
    return admitted, ends


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_at_most_max_agents_run_and_the_next_in_order_follows() -> None:
    admission = AgentAdmission(2)
    admitted, ends = await running(admission, 4)
    assert admitted == [0, 1]
    ends[1].set()
    await settled()
    assert admitted == [0, 1, 2] and admission.num_running == 2


async def test_agents_run_while_their_predicted_cache_fits() -> None:
    admission = AgentAdmission(100, cache_tokens=1000, first_tokens=300)
    admitted, ends = await running(admission, 8, tokens=500)
    assert admitted == [0, 1, 2]
    ends[0].set()  # its trajectory has 500 tokens: the next one is expected to have as many
    await settled()
    assert admission.predicted_tokens == 500 and admitted == [0, 1, 2]
    ends[1].set()
    await settled()
    assert admitted == [0, 1, 2, 3]


async def test_one_agent_runs_even_if_the_cache_is_too_small() -> None:
    admitted, ends = await running(AgentAdmission(8, cache_tokens=10, first_tokens=50), 2)
    assert admitted == [0]
    ends[0].set()
    await settled()
    assert admitted == [0, 1]


async def test_a_cancelled_wait_holds_no_place() -> None:
    admission = AgentAdmission(1)

    async def agent() -> None:
        async with admission.admit():
            await asyncio.Event().wait()

    first, second, third = (asyncio.ensure_future(agent()) for _ in range(3))
    await settled()
    second.cancel()
    first.cancel()
    await settled()
    assert admission.num_running == 1 and not third.done()
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    assert admission.num_running == 0
