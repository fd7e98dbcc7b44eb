"""The client of a reward server, against real servers that answer, fail, hang and talk nonsense."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rlscale.config import RewardConfig, RewardType
from rlscale.rewards import RewardRunner, load_reward
from rlscale.rewards.remote_reward import RemoteReward, RewardServerError
from rlscale.types import FailureCause, Sample

MakeSample = Callable[..., Sample]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET = "s3cr3t"


async def with_server(handler: Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    """Serves at a URL with a login and a key."""
    app = web.Application()
    app.router.add_post("/grade", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return await use(f"http://user:{SECRET}@127.0.0.1:{port}/grade?api_key={SECRET}")
    finally:
        await runner.cleanup()


def remote(url: str, **values: Any) -> RemoteReward:
    return RemoteReward(RewardConfig(type=RewardType.remote_rm, url=url, **values))


async def length(request: web.Request) -> web.Response:
    body = await request.json()
    values = [len(each["response"]) for each in body] if isinstance(body, list) else len(body["response"])
    return web.json_response(values)


def test_the_server_gets_prompt_response_and_label(make_sample: MakeSample) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.query["api_key"]))
        return web.json_response({"score": 0.5, "style": 2})

    async def use(url: str) -> Any:
        return await remote(url)(make_sample("four", label="4"))

    assert asyncio.run(with_server(handler, use)) == {"score": 0.5, "style": 2}
    assert seen == [({"prompt": "1+1=", "response": "four", "label": "4"}, SECRET)]


def test_several_samples_share_a_request(make_sample: MakeSample) -> None:
    sizes: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        sizes.append(len(await request.json()))
        return await length(request)

    async def use(url: str) -> list[float]:
        reward = remote(url, batch_size=4)
        return list(await asyncio.gather(*[reward(make_sample("x" * i, index=i)) for i in range(10)]))

    assert asyncio.run(with_server(handler, use)) == list(range(10))
    assert sorted(sizes) == [2, 4, 4]


def test_at_most_max_concurrency_requests_are_open(make_sample: MakeSample) -> None:
    open_now, most, full, may_answer = 0, 0, asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 3:
            full.set()
        await may_answer.wait()
        open_now -= 1
        return web.json_response(1)

    async def use(url: str) -> None:
        reward = remote(url, max_concurrency=3)
        rewards = asyncio.gather(*[reward(make_sample("x", index=i)) for i in range(12)])
        await full.wait()
        # The server has time for a fourth request: it answers others, which are sent later, one after the other.
        async with aiohttp.ClientSession() as other:
            for _ in range(20):
                async with other.get(url) as answer:
                    assert answer.status == 405
        assert open_now == 3
        may_answer.set()
        await rewards

    asyncio.run(with_server(handler, use))
    assert most == 3


async def fails(request: web.Request) -> web.Response:
    return web.Response(status=503, text=f"overloaded at {request.path_qs}")


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.json_response(1)


async def no_json(request: web.Request) -> web.Response:
    return web.Response(text="<html>")


async def closes(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def redirects(request: web.Request) -> web.Response:
    raise web.HTTPFound(f"http://127.0.0.1:9/?api_key={SECRET}")


async def too_few(request: web.Request) -> web.Response:
    return web.json_response([1.0])


FAILING = [
    (fails, 1, "answered with status 503: overloaded at <hidden>"),
    (hangs, 1, "did not answer within reward.timeout_s=0.3"),
    (no_json, 1, "must answer with JSON, got '<html>'"),
    (closes, 1, "cannot be used: ServerDisconnectedError"),
    (redirects, 1, "answered with status 302"),
    (too_few, 2, "must answer a list of 2 values, got [1.0]"),
    (fails, 2, "answered with status 503"),
]


@pytest.mark.parametrize(("handler", "batch_size", "message"), FAILING)
@pytest.mark.slow
def test_every_error_is_a_failure_of_its_samples_without_secrets(
    handler: Handler, batch_size: int, message: str, make_sample: MakeSample, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    samples = [make_sample("x", index=i) for i in range(batch_size)]

    async def use(url: str) -> list[str]:
        reward = remote(url, batch_size=batch_size, timeout_s=0.3)
        found = await asyncio.gather(*[reward(each) for each in samples], return_exceptions=True)
        assert all(isinstance(each, RewardServerError) for each in found)
        if batch_size == 1:
            with RewardRunner(reward) as runner:  # type: ignore[arg-type]
                failures = await runner.score(samples)
            assert failures[0].cause is FailureCause.grader and samples[0].reward is None
        return [str(each) for each in found]

    texts = asyncio.run(with_server(handler, use))
    assert all(text.startswith("the reward server http://127.0.0.1:") and message in text for text in texts)
    assert SECRET not in "".join(texts) and SECRET not in caplog.text


@pytest.mark.parametrize("value", ["good", None, [1], 1e400])
def test_an_answer_that_is_no_number_is_a_failure(value: Any, make_sample: MakeSample) -> None:
    sample = make_sample("x")

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=json.dumps(value))

    async def use(url: str) -> str:
        with RewardRunner(remote(url)) as runner:  # type: ignore[arg-type]
            return (await runner.score([sample]))[0].message

    assert "must be a finite number, got" in asyncio.run(with_server(handler, use))
    assert sample.reward is None


def test_a_server_that_does_not_run_is_named_by_its_host(make_sample: MakeSample) -> None:
    reward = remote(f"http://user:{SECRET}@127.0.0.1:9/{SECRET}")
    with pytest.raises(
        RewardServerError, match=r"http://127\.0\.0\.1:9 cannot be used: connection refused at 127"
    ) as caught:
        asyncio.run(reward(make_sample("x")))
    assert SECRET not in str(caught.value)


def test_a_boxed_remote_reward_sends_the_box(make_sample: MakeSample) -> None:
    async def use(url: str) -> float:
        value: Any = load_reward(RewardConfig(type=RewardType.boxed_remote_rm, url=url))(make_sample(r"so \boxed{123}"))
        return float(await value)

    assert asyncio.run(with_server(length, use)) == 3.0
