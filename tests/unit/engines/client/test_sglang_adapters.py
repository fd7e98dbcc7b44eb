"""Names of versions on an SGLang server that is a dictionary here; the contract suite has a real one."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rlscale.engines.client.sglang_adapters import SglangAdapters, adapter_path
from rlscale.errors import EngineError
from rlscale.types import EngineAddress
from rlscale.weight_types import AdapterUpdate

ADDRESS = EngineAddress(name="engine 0", url="http://127.0.0.1:9", num_ranks=2, adapter="policy", names_versions=True)


class Server:
    """The calls of SGLang that adapters need, in place of a connection."""

    def __init__(self, *names: str) -> None:
        self.names, self.calls, self.bodies = list(names), list[str](), list[Any]()
        self.delays: list[asyncio.Event] = []

    def endpoint(self, path: str) -> str:
        return f"engine 0 ({path})"

    async def call(self, method: str, path: str, body: Any = None, *, may_repeat: bool = False) -> Any:
        assert may_repeat == (method == "GET")
        if path == "/v1/models":
            self.calls.append("list")
            found = [{"id": name} for name in ("/models/qwen", *self.names)]
            if self.delays:
                await self.delays.pop(0).wait()
            return {"data": found}
        self.bodies.append(body)
        if path == "/load_lora_adapter_from_tensors":
            self.calls.append(f"load {body['lora_name']}")
            self.names.append(body["lora_name"])
        elif path == "/unload_lora_adapter":
            self.calls.append(f"unload {body['lora_name']}")
            self.names.remove(body["lora_name"])
        else:
            self.calls.append(f"version {body['new_version']}")
        return {"success": True}


def open_adapters(*names: str, address: EngineAddress = ADDRESS) -> tuple[Server, SglangAdapters]:
    server: Any = Server(*names)
    return server, SglangAdapters(address, server)


def update(version: int, *, is_repeated: bool = False) -> AdapterUpdate:
    return AdapterUpdate(
        name="policy",
        version=str(version),
        config={"r": 2},
        payload="",
        checksums={},
        sglang_payload="pickle",
        sha256={"a": "1"},
        is_repeated=is_repeated,
    )


async def test_a_version_is_loaded_under_its_own_name_for_every_rank() -> None:
    server, adapters = open_adapters("policy@8", "other@9")
    await adapters.load(update(10))
    assert server.calls == ["list", "load policy@10", "version 10"]
    body = server.bodies[0]
    assert body["serialized_named_tensors"] == ["pickle"] * 2 and body["expected_checksums"] == {"a": "1"}
    assert body["config_dict"] == {"peft_type": "LORA", "r": 2}
    assert await adapters.loaded() == {"policy": ["8", "10"], "other": ["9"]} and await adapters.newest() == 10
    assert adapter_path(ADDRESS, 10) == "policy@10" and adapter_path(replace(ADDRESS, adapter=None), None) is None


async def test_versions_of_an_attempt_that_failed_are_replaced() -> None:
    server, adapters = open_adapters("policy@7", "policy@8", "policy@9")
    await adapters.load(update(8))
    assert server.calls[1:] == ["unload policy@8", "unload policy@9", "load policy@8", "version 8"]


async def test_a_version_that_is_sent_again_stays_in_use() -> None:
    server, adapters = open_adapters("policy@8")
    await adapters.load(update(8, is_repeated=True))
    assert server.calls == ["list", "version 8"]
    restarted, adapters = open_adapters()
    await adapters.load(update(8, is_repeated=True))
    assert restarted.calls == ["list", "load policy@8", "version 8"]


async def test_old_versions_are_unloaded_by_number() -> None:
    server, adapters = open_adapters("policy@10", "policy@9", "policy@8", "other@1")
    await adapters.prune("policy", num_kept=2)
    assert server.calls == ["list", "unload policy@8"]
    await adapters.unload("policy")
    assert server.names == ["other@1"]
    with pytest.raises(EngineError, match="lora_name must be a loaded adapter, got policy"):
        await adapters.unload("policy")
    with pytest.raises(EngineError, match="lora_path must be a loaded adapter, got policy") as caught:
        await adapters.newest()
    assert caught.value.status == 400


async def test_requests_that_wait_share_a_call_that_starts_after_them() -> None:
    server, adapters = open_adapters("policy@1")
    server.delays = [asyncio.Event(), asyncio.Event()]
    first, second = server.delays
    early = asyncio.ensure_future(adapters.newest())
    while server.calls != ["list"]:
        await asyncio.sleep(0)
    server.names.append("policy@2")  # after the first call was answered
    late = [asyncio.ensure_future(adapters.newest()) for _ in range(3)]
    first.set()
    second.set()
    assert await early == 1 and await asyncio.gather(*late) == [2, 2, 2]
    assert server.calls == ["list", "list"]


async def test_a_request_that_is_cancelled_does_not_fail_the_others() -> None:
    server, adapters = open_adapters("policy@1")
    server.delays = [asyncio.Event()]
    (answered,) = server.delays
    requests = [asyncio.ensure_future(adapters.newest()) for _ in range(2)]
    while not server.calls:
        await asyncio.sleep(0)
    requests[0].cancel()
    answered.set()
    assert await requests[1] == 1


async def test_pickles_go_to_private_servers_only() -> None:
    public = replace(ADDRESS, url="http://10.0.0.2:9")
    server, adapters = open_adapters(address=public)
    message = "engine 0 must listen on loopback or require an API key to get adapters, got 10.0.0.2 without a key"
    with pytest.raises(EngineError, match=message):
        await adapters.load(update(1))
    assert server.calls == []
    server, adapters = open_adapters(address=replace(public, api_key="key"))
    await adapters.load(update(1))
    assert "load policy@1" in server.calls
