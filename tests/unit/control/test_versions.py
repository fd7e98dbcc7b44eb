"""The gate that keeps generation inside the staleness bound."""

import asyncio

import pytest

from rlscale.control.version_gate import VersionGate


async def test_waits_until_the_version_is_there() -> None:
    gate = VersionGate(0)
    waiter = asyncio.create_task(gate.wait_for(2))
    await gate.open(1)
    await asyncio.sleep(0)
    assert not waiter.done()
    await gate.open(3)
    assert await waiter == 3


async def test_an_older_version_does_not_wait() -> None:
    assert await VersionGate(4).wait_for(2) == 4


async def test_versions_never_go_back() -> None:
    with pytest.raises(AssertionError, match="never go back"):
        await VersionGate(4).open(3)
