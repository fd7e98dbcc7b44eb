"""Arguments of sglang-router, and the calls that it forwards."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.engines.client import http_engine
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.engines.sglang import router_process
from rlscale.engines.sglang.router_process import RouterLaunch
from rlscale.errors import EngineError
from rlscale.types import EngineAddress, SamplingParams

WORKERS = [EngineAddress(name=f"engine {i}", url=f"http://127.0.0.1:{4000 + i}") for i in range(2)]


def launch_of(*overrides: str, api_key: str | None = None) -> RouterLaunch:
    config = load_config(["rollout=sglang", "cluster.rollout_num_gpus=2", *overrides])
    return RouterLaunch(python=Path("/opt/python"), config=config.router, api_key=api_key)


def test_every_key_reaches_the_router() -> None:
    overrides = ("router.policy=round_robin", "router.timeout_s=7", "router.max_connections=9")
    more = ("router.health_check_failure_threshold=5", "router.health_check_interval_s=4")
    arguments = launch_of(*overrides, *more).arguments("127.0.0.1", 80, ["http://a", "http://b"])
    assert arguments["worker_urls"] == ["http://a", "http://b"]
    assert arguments["policy"] == "round_robin" and arguments["request_timeout_secs"] == 7
    assert arguments["max_concurrent_requests"] == 9
    assert arguments["health_failure_threshold"] == 5 and arguments["health_check_interval_secs"] == 4


def test_the_router_never_retries() -> None:
    arguments = launch_of().arguments("127.0.0.1", 80, ["http://a"])
    assert arguments["disable_retries"] is True and arguments["disable_circuit_breaker"] is True
    assert arguments["queue_size"] == 0 and arguments["prometheus_host"] == "127.0.0.1"


def test_a_key_is_in_no_file_and_on_no_command_line(tmp_path: Path) -> None:
    address, process = launch_of(api_key="secret").open(tmp_path, WORKERS)
    written = (tmp_path / "router_arguments.json").read_text()
    assert json.loads(written)["worker_urls"] == [worker.url for worker in WORKERS]
    assert "secret" not in written and not any("secret" in argument for argument in process.command)
    assert address.api_key == "secret" and "secret" not in repr(address)


def test_an_address_of_ipv6_is_in_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_process, "reserve_port", lambda host: 23456)  # a machine may have no IPv6
    address, process = launch_of(api_key="secret").open(tmp_path, WORKERS, host="fd00::1")
    assert address.url == process.url == "http://[fd00::1]:23456"
    assert json.loads((tmp_path / "router_arguments.json").read_text())["host"] == "fd00::1"


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with FakeServer(vocab_size=100) as engine, FakeServer(vocab_size=100) as router:
        yield [engine, router]


async def test_only_generation_goes_through_the_router(fakes: list[FakeServer]) -> None:
    engine, router = fakes
    client = HttpEngine(
        EngineAddress(name="engine 0", url=engine.url),
        timeout_s=5,
        router=EngineAddress(name="router", url=router.url),
    )
    answers = await client.generate([5, 6], SamplingParams(max_new_tokens=2), n=2)
    assert [answer.engine for answer in answers] == ["router", "router"]
    assert [item async for item in client.stream([5, 6], SamplingParams(max_new_tokens=2))][-1].engine == "router"
    await client.begin_weight_update()
    await client.end_weight_update(7)
    assert (await client.info())["weight_version"] == 7
    await client.pause("retract")
    await client.resume()
    await client.close()
    assert router.service.num_requests == 2 and engine.service.num_requests == 0
    assert engine.service.version == "7" and router.service.version == "0"


async def test_single_samples_are_those_of_one_request(
    fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, router = (
        EngineAddress(name=name, url=f.url) for name, f in zip(("engine 0", "router"), fakes, strict=True)
    )
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, sampling_seed=7)
    direct = HttpEngine(router, timeout_s=5)
    expected = await direct.generate([5, 6], params, n=3)
    await direct.close()
    monkeypatch.setattr(http_engine, "SERVER_NAME", "another")  # the client takes the servers for SGLang
    for address, reason in ((router, None), (replace(router, url="http://127.0.0.1:9"), "router .* must answer")):
        client = HttpEngine(engine, timeout_s=5, router=address)
        if reason is None:
            assert await client.generate([5, 6], params, n=3, rid="train-1") == expected
        else:
            with pytest.raises(EngineError, match=reason):
                await client.generate([5, 6], params, n=3, rid="train-1")
        await client.close()


async def test_an_unreachable_router_is_named(fakes: list[FakeServer]) -> None:
    client = HttpEngine(
        EngineAddress(name="engine 0", url=fakes[0].url),
        timeout_s=5,
        router=EngineAddress(name="router", url="http://127.0.0.1:9"),
    )
    with pytest.raises(EngineError, match=r"router \(http://127.0.0.1:9/generate\) must answer"):
        await client.generate([5], SamplingParams(max_new_tokens=1))
    await client.close()
