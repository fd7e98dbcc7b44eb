"""Connections to engines: all of them end when the engine's host is lost."""

import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from rlscale.config import RouterPolicy
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.engines.middleware_router.forwarding import Call, EngineCalls
from rlscale.engines.middleware_router.worker_table import WorkerTable
from rlscale.rewards.judge_client import JudgeClient, JudgeSpec
from rlscale.tcp_keepalive import SILENCE_S, open_socket
from rlscale.types import EngineAddress, SamplingParams
from tests.tcp_connections import ESTABLISHED, KEEPALIVE, connections_to


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(vocab_size=100, max_context_len=256, token_s=0.01) as server:
        yield server


async def call_engine(url: str) -> Callable[[], Awaitable[None]]:
    engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=5)
    await engine.weight_version()  # a call that may be repeated: its connection stays open
    return engine.close


async def change_engine(url: str) -> Callable[[], Awaitable[None]]:
    engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=5)
    await engine.resume()
    return engine.close


async def stream(url: str) -> Callable[[], Awaitable[None]]:
    engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=5)
    events = engine.stream([5], SamplingParams(max_new_tokens=200, ignore_eos=True))
    await anext(events)

    async def close() -> None:
        await events.aclose()
        await engine.close()

    return close


async def forward(url: str) -> Callable[[], Awaitable[None]]:
    table = WorkerTable(RouterPolicy.round_robin)
    table.record_health(table.add(url), is_healthy=True)
    calls = EngineCalls(table, timeout_s=5, max_running=1, check_interval_s=60)
    await calls.open()
    answer = await calls.send(Call(method="GET", path="/model_info", body=b"", headers={}, key=None))
    await answer.read()
    answer.close()
    return calls.close


async def ask_judge(url: str) -> Callable[[], Awaitable[None]]:
    judge = JudgeClient(JudgeSpec(addresses=(EngineAddress(name="engine 0", url=url),), model_path="unused"))
    await judge.generate("Is 7 prime?", max_new_tokens=1)

    async def close() -> None:
        """The end of the event loop closes the connection."""

    return close


@pytest.mark.parametrize("client", [call_engine, change_engine, stream, forward, ask_judge])
async def test_idle_connections_are_probed(
    fake: FakeServer, client: Callable[[str], Awaitable[Callable[[], Awaitable[None]]]]
) -> None:
    close = await client(fake.url)
    open_now = [each for each in connections_to(fake.url) if each.state == ESTABLISHED]
    assert open_now and all(each.timer == KEEPALIVE for each in open_now)
    await close()


def test_a_silent_host_is_found_within_the_bound() -> None:
    (address, *_) = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    with open_socket(address) as opened:
        idle, interval, number, unacknowledged = (
            opened.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
    assert number > 1  # one lost packet ends no connection
    assert idle + number * interval == SILENCE_S
    assert unacknowledged == 1000 * SILENCE_S
