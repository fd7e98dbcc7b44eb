"""A real sglang-router in front of fake engines: load balancing, dead engines, and access."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from rlscale.config import RouterConfig
from rlscale.config.passthrough.sglang_python import find_python
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.engines.sglang.router_process import RouterLaunch, RouterProcess
from rlscale.errors import EngineError
from rlscale.types import EngineAddress, Generation, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, sampling_seed=1)
CONFIG = RouterConfig(timeout_s=60, max_connections=64, health_check_interval_s=1, health_check_failure_threshold=1)
READY_S = 120


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def open_fake(stack: ExitStack, api_key: str | None = None) -> FakeServer:
    return stack.enter_context(FakeServer(vocab_size=100, token_s=0.005, api_key=api_key))


def open_router(
    stack: ExitStack, folder: Path, fakes: list[FakeServer], api_key: str | None = None
) -> tuple[EngineAddress, RouterProcess]:
    launch = RouterLaunch(python=find_python(None), config=CONFIG, api_key=api_key)
    workers = [EngineAddress(name=f"engine {i}", url=fake.url, api_key=api_key) for i, fake in enumerate(fakes)]
    address, process = launch.open(folder, workers)
    process.start()
    stack.callback(process.stop)
    process.wait_ready(READY_S)
    return address, process


async def send_all(router: EngineAddress, engine: FakeServer, num: int) -> list[Generation | BaseException]:
    address = EngineAddress(name="engine 0", url=engine.url, api_key=router.api_key)
    client = HttpEngine(address, timeout_s=30, router=router)
    calls = [client.generate([5, i], PARAMS, n=2, rid=f"r{i}") for i in range(num)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await client.close()
    return [a if isinstance(a, BaseException) else a[1] for a in answers]


def test_both_engines_answer_and_responses_are_unchanged(stack: ExitStack, tmp_path: Path) -> None:
    fakes = [open_fake(stack) for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes)
    through = asyncio.run(send_all(router, fakes[0], 40))
    direct = asyncio.run(send_all(EngineAddress(name="router", url=fakes[0].url), fakes[0], 40))
    # Parameters, ids, seeds, logprobs and versions are forwarded unchanged.
    assert through == direct
    assert all(fake.service.num_requests > 5 for fake in fakes)


def test_a_dead_engine_is_avoided_and_replaced(stack: ExitStack, tmp_path: Path) -> None:
    alive, new = open_fake(stack), open_fake(stack)
    with ExitStack() as dying:
        dead = open_fake(dying)
        router, process = open_router(stack, tmp_path, [alive, dead])
        old = dead.url
    end = time.monotonic() + 60
    while process.num_healthy > 1:
        assert time.monotonic() < end, "the router still sends requests to a dead engine"
        time.sleep(0.2)
    assert not any(isinstance(a, BaseException) for a in asyncio.run(send_all(router, alive, 10)))
    process.replace_worker(old, new.url)
    assert process.num_healthy == 2
    assert not any(isinstance(a, BaseException) for a in asyncio.run(send_all(router, alive, 30)))
    assert new.service.num_requests > 3


def test_an_error_of_an_engine_is_forwarded_unchanged(stack: ExitStack, tmp_path: Path) -> None:
    fakes = [open_fake(stack) for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes)

    async def send_too_long() -> None:
        client = HttpEngine(EngineAddress(name="engine 0", url=fakes[0].url), timeout_s=30, router=router)
        try:
            await client.generate([5], replace(PARAMS, max_new_tokens=10**6))
        finally:
            await client.close()

    with pytest.raises(EngineError, match=r"router .* refused with status 400: input_ids must fit"):
        asyncio.run(send_too_long())
    # The router does not retry.
    assert sum(fake.service.num_requests for fake in fakes) == 0


def test_requests_without_the_key_are_refused(stack: ExitStack, tmp_path: Path) -> None:
    fakes = [open_fake(stack, "secret") for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes, "secret")
    assert router.api_key == "secret"
    assert not any(isinstance(a, BaseException) for a in asyncio.run(send_all(router, fakes[0], 6)))

    async def status(path: str, headers: dict[str, str]) -> int:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(router.url + path) as response:
            return response.status

    assert asyncio.run(status("/workers", {})) == 401
    assert asyncio.run(status("/workers", {"Authorization": "Bearer secret"})) == 200


def test_a_dead_router_reports_its_status(stack: ExitStack, tmp_path: Path) -> None:
    _, process = open_router(stack, tmp_path, [open_fake(stack)])
    assert process.poll() is None and process.pid is not None
    process.stop()
    assert str(process.poll()).startswith("router ended with status")
