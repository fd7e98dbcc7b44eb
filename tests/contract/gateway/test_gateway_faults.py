"""Wrong keys, wrong bodies, broken connections, engines that pause or fail, and a thousand sessions at once."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.gateway.gateway_client import GatewayClient, GatewaySession
from rlscale.gateway.gateway_process import GatewayProcess
from rlscale.gateway.request_body import MAX_BODY_BYTES
from rlscale.types import SampleStatus
from tests.gateway_fixtures import (
    LoggedFake,
    check_exact,
    gateway_process,
    logged_fake,
    new_trajectory,
    open_session,
    params,
)

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.fixture
async def http(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(gateway.address.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: Any, key: str = "", **headers: str) -> tuple[int, Any]:
    given = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {}), **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=data, headers=given) as response:
        text = await response.text()
        assert "Traceback" not in text
        return response.status, json.loads(text)


async def test_a_key_opens_its_own_session_only(
    client: GatewayClient, http: aiohttp.ClientSession, gateway: GatewayProcess
) -> None:
    one, two = await open_session(client), await open_session(client)
    expired = await client.open_session(new_trajectory(), params(), lifetime_s=-1)
    mixed = f"{one.id}.{two.api_key.partition('.')[2]}"
    for key in ("", "x", one.id, mixed, f"{one.api_key}0", expired.api_key, gateway.launch.admin_key):
        for path in (CHAT, "/v1/responses", MESSAGES, "/v1/messages/count_tokens"):
            status, answer = await post(http, path, BODY, key)
            assert status == 401 and answer["error"]["type"] == "authentication_error", (key, path)
    assert (await post(http, CHAT, BODY, one.api_key))[0] == 200
    assert (await post(http, CHAT, BODY, **{"x-api-key": one.api_key}))[0] == 200
    # The key of a session reads no record, not even its own.
    for path in (f"/sessions/{one.id}/finish", "/sessions", "/pause", "/resume"):
        assert (await post(http, path, {}, one.api_key))[0] == 401
    for method, path in (("GET", f"/sessions/{two.id}"), ("DELETE", f"/sessions/{two.id}"), ("PUT", "/engines")):
        async with http.request(method, path, headers={"Authorization": f"Bearer {one.api_key}"}) as response:
            assert response.status == 401
    assert (await client.record(one.id)).metadata["num_calls"] == 2
    assert not (await client.finish(two.id)).turns
    assert (await post(http, CHAT, BODY, two.api_key))[0] == 401
    page = {"Origin": "http://evil.example"}
    assert (await post(http, CHAT, BODY, one.api_key, **page))[0] == 403
    for each in (one, expired):
        await client.drop(each.id)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[1]", 400),
        (b"[" * 200_000, 400),
        pytest.param(b'{"messages": [{"role": "user", "content": "' + b"a" * MAX_BODY_BYTES, 413, id="large"),
        (b'{"messages": [{"role": "user", "content": {"a": 1}}], "max_tokens": 1}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}', 400),
        (b'{"messages": [{"role": "robot", "content": "a"}], "max_tokens": 1}', 400),
        (b'{"messages": [{"role": "user", "content": "' + b"a" * 9_000 + b'"}], "max_tokens": 1}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}', 400),
    ],
)
async def test_a_wrong_body_is_an_error_of_its_api(
    client: GatewayClient, http: aiohttp.ClientSession, body: bytes, status: int
) -> None:
    session = await open_session(client)
    got, answer = await post(http, CHAT, body, session.api_key)
    assert got == status and set(answer["error"]) == {"message", "type", "param", "code"}
    got, answer = await post(http, MESSAGES, body, session.api_key)
    assert got == status and answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
    trajectory = await client.finish(session.id)
    assert not trajectory.turns


async def test_an_unknown_endpoint_is_an_error(http: aiohttp.ClientSession) -> None:
    assert (await post(http, "/v1/embeddings", {}))[0] == 404
    async with http.get(CHAT) as response:
        assert response.status == 405


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoggedFake, GatewayProcess]]:
    """An engine that takes 10 ms for a token, and its gateway."""
    with logged_fake(token_s=0.01) as fake, gateway_process(tmp_path_factory.mktemp("slow"), [fake.address]) as gateway:
        yield fake, gateway


async def until(condition: Callable[[], bool], *, limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def open_slow(slow: tuple[LoggedFake, GatewayProcess]) -> tuple[GatewayClient, GatewaySession]:
    slow[0].entries.clear()
    client = GatewayClient(slow[1].address)
    return client, await open_session(client, ignore_eos=True)


async def test_requests_without_a_waiting_client_are_not_recorded(slow: tuple[LoggedFake, GatewayProcess]) -> None:
    fake, _ = slow
    client, session = await open_slow(slow)
    url = session.base_url + "/chat/completions"
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        # A client that disconnects.
        call = asyncio.create_task(http.post(url, json=BODY))
        await until(lambda: fake.server.service.load().running == 1)
        call.cancel()
        await until(lambda: fake.server.service.load().running == 0)
        assert not (await client.record(session.id)).turns
        # A session that ends while a client waits.
        call = asyncio.create_task(http.post(url, json=BODY))
        await until(lambda: fake.server.service.load().running == 1)
        assert not (await client.finish(session.id)).turns
        assert (await call).status == 401
    assert fake.server.service.load().running == 0 and not fake.entries
    await client.close()


async def test_requests_wait_while_the_gateway_is_paused(slow: tuple[LoggedFake, GatewayProcess]) -> None:
    fake, gateway = slow
    client, session = await open_slow(slow)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        small = {**BODY, "max_tokens": 20}
        first = asyncio.create_task(http.post(session.base_url + "/chat/completions", json=small))
        await until(lambda: fake.server.service.load().running == 1)
        await client.pause(waits_idle=True)
        assert fake.server.service.load().running == 0 and (await first).status == 200
        # A gateway that dies now starts paused.
        gateway.is_paused = client.is_paused
        await asyncio.to_thread(gateway.restart)
        second = asyncio.create_task(http.post(session.base_url + "/chat/completions", json=small))
        await fake.server.service.set_version("8", abort_all=False)
        assert (await client.status())["is_paused"] and not second.done()
        await client.resume()
        gateway.is_paused = False
        assert (await second).status == 200
    trajectory = await client.finish(session.id)
    await fake.server.service.set_version("0", abort_all=False)
    assert trajectory.versions == {0, 8}
    check_exact(trajectory, fake)
    await client.close()


async def test_an_aborted_answer_is_continued(slow: tuple[LoggedFake, GatewayProcess]) -> None:
    fake, _ = slow
    client, session = await open_slow(slow)
    engine = HttpEngine(fake.address, timeout_s=10)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        call = asyncio.create_task(http.post(session.base_url + "/chat/completions", json=BODY))
        await until(lambda: any(len(each.ids) > 5 for each in fake.server.service._running))
        await engine.pause("abort")
        await fake.server.service.set_version("9", abort_all=False)
        await engine.resume()
        response = await call
        answer = await response.json()
    assert answer["usage"]["completion_tokens"] == 200 and answer["choices"][0]["finish_reason"] == "length"
    (turn,) = [each for each in (await client.finish(session.id)).turns if each.sampled]
    assert [span.version for span in turn.spans] == [0, 9] and len(turn.token_ids) == 200
    parts = sorted(fake.entries, key=lambda each: len(each.input_ids))
    assert [token for part in parts for token in part.output_ids] == turn.token_ids.tolist()
    await fake.server.service.set_version("0", abort_all=False)
    await engine.close()
    await client.close()


async def test_failures_of_an_engine_are_retried(
    client: GatewayClient, http: aiohttp.ClientSession, fake: LoggedFake
) -> None:
    session = await open_session(client)
    fake.server.faults.errors_next, fake.server.faults.drops_next = 1, 1
    assert (await post(http, CHAT, BODY, session.api_key))[0] == 200
    trajectory = await client.finish(session.id)
    assert trajectory.status == SampleStatus.completed
    check_exact(trajectory, fake)


async def test_unequal_calls_of_one_session_run_at_the_same_time(slow: tuple[LoggedFake, GatewayProcess]) -> None:
    """Without `max_tokens`; a parallel agent would otherwise take as long as one after the other."""
    fake, _ = slow
    client, session = await open_slow(slow)
    bodies = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("one", "two", "three")]
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        calls = [asyncio.create_task(http.post(session.base_url + "/chat/completions", json=body)) for body in bodies]
        await until(lambda: fake.server.service.load().running == 3)
        assert not any(call.done() for call in calls), "all three are at the engine"
        for call in calls:
            call.cancel()
        await until(lambda: fake.server.service.load().running == 0)
    await client.drop(session.id)
    await client.close()


async def test_only_engines_that_the_driver_names_get_requests(tmp_path: Path) -> None:
    """An engine that died, or joins, is not named before it holds the current weights; until then requests wait."""
    with logged_fake() as first, logged_fake() as second:
        one, two = first.address, replace(second.address, name="engine 1")
        with gateway_process(tmp_path, [one, two]) as gateway:
            client = GatewayClient(gateway.address)
            sessions = [await open_session(client) for _ in range(2)]
            async with aiohttp.ClientSession(gateway.address.url) as http:
                for session in sessions:
                    assert (await post(http, CHAT, BODY, session.api_key))[0] == 200
                assert len(first.entries) == len(second.entries) == 1, "the sessions are spread"
                await client.set_engines([two])
                assert (await post(http, CHAT, BODY, sessions[0].api_key))[0] == 200
                assert len(first.entries) == 1
                await client.set_engines([])
                calls = [asyncio.create_task(post(http, CHAT, BODY, each.api_key)) for each in sessions]
                # Paused while no engine is named: both conditions hold requests back.
                await client.pause(waits_idle=True)
                await first.server.service.set_version("4", abort_all=False)
                await client.resume()
                assert (await client.status())["num_running"] == 0 and not any(call.done() for call in calls)
                await client.set_engines([one])
                assert [(await call)[0] for call in calls] == [200, 200]
            trajectories = [await client.finish(each.id) for each in sessions]
            assert [each.versions for each in trajectories] == [{0, 4}, {0, 4}]
            assert len(first.entries) == 3 and len(second.entries) == 2
            await client.close()


@pytest.mark.slow
async def test_a_thousand_sessions_survive_a_killed_gateway(tmp_path: Path, fake: LoggedFake) -> None:
    """Every call is answered and recorded once, whenever the gateway is killed."""
    fake.entries.clear()
    with gateway_process(tmp_path, [fake.address], calls_tools=True) as gateway:
        client, answered = GatewayClient(gateway.address), list[str]()

        async def run(http: aiohttp.ClientSession, number: int) -> Any:
            session = await client.open_session(new_trajectory(number), params(), lifetime_s=600)
            messages: list[Any] = [{"role": "user", "content": f"session {number}"}]
            for _ in range(2):
                body, attempt = {"model": "m", "messages": messages, "max_tokens": 20}, 0
                while True:
                    try:
                        headers = {"x-stainless-retry-count": str(attempt)}
                        status, answer = await post(http, CHAT, body, session.api_key, **headers)
                        break
                    except aiohttp.ClientError:
                        attempt += 1
                        await asyncio.sleep(0.2)
                assert status == 200, answer
                message = answer["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "more"}]
                answered.append(answer["id"])
            return await client.finish(session.id)

        async def kill() -> None:
            await until(lambda: len(answered) > 500, limit_s=600)
            assert gateway.pid is not None
            os.kill(gateway.pid, signal.SIGKILL)
            await asyncio.to_thread(gateway.restart)

        async with aiohttp.ClientSession(gateway.address.url, connector=aiohttp.TCPConnector(limit=0)) as http:
            killer = asyncio.create_task(kill())
            trajectories = await asyncio.gather(*[run(http, number) for number in range(1000)])
            await killer
        assert [each.id for each in trajectories] == list(range(1000))
        assert all(each.metadata["num_calls"] == 2 and len(each.samples()) == 1 for each in trajectories)
        assert len(answered) == len(set(answered)) == 2000
        logged = {(each.input_ids, each.output_ids) for each in fake.entries}
        for each in trajectories:
            for number, turn in enumerate(each.turns):
                ids = tuple(turn.token_ids.tolist())
                before = tuple(each.token_ids(number)[: -len(ids)])
                assert not turn.sampled or (before, ids) in logged
        assert (await client.status())["num_sessions"] == 0 and not list((tmp_path / "sessions").iterdir())
        await client.close()
