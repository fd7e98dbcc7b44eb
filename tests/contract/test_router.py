"""A real sglang-router, and that of rlscale, in front of fake engines: load balancing, dead engines, and access."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rlscale.config import RouterConfig, RouterPolicy
from rlscale.config.passthrough.sglang_python import find_python
from rlscale.config.passthrough.sglang_sampling_params import CHANGES_DISTRIBUTION, DROPPED_BY_ROUTER, EMBEDDED
from rlscale.engines.client import http_engine
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.client.request_ids import RequestIds
from rlscale.engines.fake import FakeServer
from rlscale.engines.middleware_router.middleware_launch import MiddlewareRouterLaunch
from rlscale.engines.sglang.router_process import RouterLaunch, RouterProcess
from rlscale.errors import EngineError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, Generation, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, sampling_seed=1)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONFIG = RouterConfig(timeout_s=60, max_connections=64, health_check_interval_s=1, health_check_failure_threshold=1)
READY_S = 120


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(params=["sglang", "middleware"])
def kind(request: pytest.FixtureRequest) -> str:
    """The router under test."""
    return str(request.param)


def open_fake(stack: ExitStack, api_key: str | None = None) -> FakeServer:
    return stack.enter_context(FakeServer(vocab_size=100, token_s=0.005, api_key=api_key))


def open_router(
    stack: ExitStack,
    folder: Path,
    fakes: list[FakeServer],
    *,
    kind: str,
    api_key: str | None = None,
    config: RouterConfig = CONFIG,
) -> tuple[EngineAddress, RouterProcess]:
    launch = (
        MiddlewareRouterLaunch(config=config, api_key=api_key, model_path="unused")
        if kind == "middleware"
        else RouterLaunch(python=find_python(None), config=config, api_key=api_key)
    )
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


def test_both_engines_answer_and_responses_are_unchanged(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    fakes = [open_fake(stack) for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes, kind=kind)
    through = asyncio.run(send_all(router, fakes[0], 40))
    direct = asyncio.run(send_all(EngineAddress(name="router", url=fakes[0].url), fakes[0], 40))
    # Parameters, ids, seeds, logprobs and versions are forwarded unchanged.
    assert through == direct
    assert all(fake.service.num_requests > 5 for fake in fakes)


PASSABLE: dict[str, Any] = {
    "custom_params": {"a": 1},
    "ebnf": 'root ::= "a"',
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "json_schema": "{}",
    "logit_bias": {"3": 1.0},
    "min_new_tokens": 1,
    "no_stop_trim": True,
    "presence_penalty": 0.5,
    "regex": "a+",
    "repetition_penalty": 1.5,
    "spaces_between_special_tokens": False,
    "stop_regex": "a+",
    "structural_tag": "{}",
}
"""A value of each entry of `rollout.sampling_params`."""


def test_only_sglang_router_drops_sampling_params(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    assert set(PASSABLE) == {*EMBEDDED, *CHANGES_DISTRIBUTION, "stop_regex"}
    received: list[dict[str, Any]] = []

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/generate":
            return await handler(request)
        received.append((await request.json())["sampling_params"])
        return web.json_response({"text": "", "output_ids": [], "meta_info": {}})

    fake = FakeServer(vocab_size=100)
    fake._app.middlewares.insert(0, record)
    router, _ = open_router(stack, tmp_path, [stack.enter_context(fake)], kind=kind)

    async def send_each() -> None:
        async with aiohttp.ClientSession() as session:
            for name, value in PASSABLE.items():
                body = {"input_ids": [5], "sampling_params": {name: value}, "return_logprob": True}
                async with session.post(f"{router.url}/generate", json=body) as response:
                    assert response.status == 200

    asyncio.run(send_each())
    dropped = [name for name, params in zip(PASSABLE, received, strict=True) if params != {name: PASSABLE[name]}]
    assert dropped == (sorted(DROPPED_BY_ROUTER) if kind == "sglang" else [])


def test_a_dead_engine_is_avoided_and_replaced(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    alive, new = open_fake(stack), open_fake(stack)
    with ExitStack() as dying:
        dead = open_fake(dying)
        router, process = open_router(stack, tmp_path, [alive, dead], kind=kind)
        old = dead.url
    end = time.monotonic() + 60
    while process.num_healthy > 1:
        assert time.monotonic() < end, "the router still sends requests to a dead engine"
        time.sleep(0.2)
    assert not any(isinstance(a, BaseException) for a in asyncio.run(send_all(router, alive, 10)))
    process.replace_worker(old, EngineAddress(name="engine 1", url=new.url))
    assert process.num_healthy == 2
    assert not any(isinstance(a, BaseException) for a in asyncio.run(send_all(router, alive, 30)))
    assert new.service.num_requests > 3


def test_an_error_of_an_engine_is_forwarded_unchanged(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    fakes = [open_fake(stack) for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes, kind=kind)

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


@pytest.mark.parametrize("server_name", ["rlscale", "sglang"])
def test_requests_are_aborted_on_the_engine_that_the_router_chose(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_name: str, kind: str
) -> None:
    # The client takes every server with another name for SGLang and sends it single samples.
    monkeypatch.setattr(http_engine, "SERVER_NAME", server_name)
    fakes = [open_fake(stack) for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes, kind=kind)
    params = replace(PARAMS, max_new_tokens=200)  # 1 s

    async def abort_half() -> tuple[list[list[Generation]], list[list[Generation]]]:
        ids = RequestIds()
        addresses = [EngineAddress(name=f"engine {i}", url=fake.url) for i, fake in enumerate(fakes)]
        pool = EnginePool([HttpEngine(a, timeout_s=30, router=router, ids=ids) for a in addresses], routed=True)
        calls = {
            rid: asyncio.create_task(pool.generate([5, 6], params, n=2, rid=rid, oldest=0, newest=None))
            for rid in (f"{purpose}-{i}" for purpose in ("train", "eval") for i in range(8))
        }
        async with asyncio.timeout(20):
            while sum(len(fake.service._running) for fake in fakes) < 32:
                await asyncio.sleep(0.01)
        await pool.abort_requests({"train"})
        answers = {rid: await call for rid, call in calls.items()}
        await pool.close()
        return ([a for r, a in answers.items() if "train" in r], [a for r, a in answers.items() if "eval" in r])

    aborted, finished = asyncio.run(abort_half())
    assert all(fake.service.num_requests > 0 for fake in fakes)
    assert {sample.finish_reason for samples in aborted for sample in samples} == {"abort"}
    assert {sample.finish_reason for samples in finished for sample in samples} == {"length"}
    assert all(len(sample.output_ids) == 200 for samples in finished for sample in samples)


def test_requests_without_the_key_are_refused(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    fakes = [open_fake(stack, "secret") for _ in range(2)]
    router, _ = open_router(stack, tmp_path, fakes, kind=kind, api_key="secret")
    assert router.api_key == "secret"
    assert not any(isinstance(a, BaseException) for a in asyncio.run(send_all(router, fakes[0], 6)))

    async def status(path: str, headers: dict[str, str]) -> int:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(router.url + path) as response:
            return response.status

    assert asyncio.run(status("/workers", {})) == 401
    assert asyncio.run(status("/workers", {"Authorization": "Bearer secret"})) == 200


def test_a_dead_router_reports_its_status(stack: ExitStack, tmp_path: Path, kind: str) -> None:
    _, process = open_router(stack, tmp_path, [open_fake(stack)], kind=kind)
    assert process.poll() is None and process.pid is not None
    process.stop()
    assert str(process.poll()).startswith("router ended with status")


HASHING = replace(CONFIG, policy=RouterPolicy.consistent_hashing)


def owners(router: EngineAddress, fakes: list[FakeServer], groups: list[int]) -> dict[int, int]:
    """The engine that gets each group, whose requests must all go to one."""
    found = {}
    for group in groups:
        before = [fake.service.num_requests for fake in fakes]

        async def send() -> None:
            client = HttpEngine(EngineAddress(name="engine 0", url=fakes[0].url), timeout_s=30, router=router)
            names = [f"train-{group}", f"train-{group}-{8 * group}", f"train-{group}-{8 * group}-1"]  # noqa: B023
            await asyncio.gather(*[client.generate([5], PARAMS, rid=name) for name in names])
            await client.close()

        asyncio.run(send())
        sent = [fake.service.num_requests - old for fake, old in zip(fakes, before, strict=True)]
        assert sorted(sent) == [0] * (len(fakes) - 1) + [3], f"the requests of group {group} were divided: {sent}"
        found[group] = sent.index(3)
    return found


def test_requests_of_a_group_go_to_one_engine_and_stay_when_another_leaves(
    stack: ExitStack, tmp_path: Path, kind: str
) -> None:
    fakes, groups = [open_fake(stack) for _ in range(2)], list(range(12))
    with ExitStack() as dying:
        third = open_fake(dying)
        left = third.url
        router, process = open_router(stack, tmp_path, [*fakes, third], kind=kind, config=HASHING)
        before = owners(router, [*fakes, third], groups)
        assert set(before.values()) == {0, 1, 2}
    end = time.monotonic() + 60
    while process.num_healthy > 2:
        assert time.monotonic() < end, "the router still sends requests to a dead engine"
        time.sleep(0.2)
    after = owners(router, fakes, groups)
    if kind == "middleware":  # sglang-router moves other groups, too
        assert {group: owner for group, owner in before.items() if owner != 2}.items() <= after.items()
        new = open_fake(stack)
        process.replace_worker(left, EngineAddress(name="engine 2", url=new.url))
        assert owners(router, [*fakes, new], groups) == before, "the restarted engine must get its groups back"
