"""Loading of adapters over HTTP: the client hides that a version has its own name in a real SGLang server."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from rlscale.algo.checksum import bytes_of, checksum
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.engines.launch_sglang import SglangLora
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import EngineAddress, Generation, SamplingParams
from rlscale.weight_types import AdapterUpdate
from rlscale.weights.adapter_sync import AdapterSource, AdapterSync
from rlscale.weights.receiver import EngineReceiver
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sglang_payload import serialize_bytes
from rlscale.weights.sync import WeightSync
from tests.contract.conftest import OPENERS, Target, Wire, open_sglang
from tests.unit.weights.test_sync import RecordingTransport

PROMPT = [5, 9, 33]
KINDS = tuple(kind for kind in OPENERS if kind != "sglang")
KINDS_WITH_WEIGHTS = ("embedded", "sglang")
LAYER = "base_model.model.model.layers.0.self_attn"
SHAPES = {"q_proj": 64, "v_proj": 32}  # output features; SGLang stacks both with those of the keys


@pytest.fixture(scope="module", params=[*KINDS, pytest.param("sglang", marks=pytest.mark.nightly)])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """As in the other contract tests; a real SGLang server must be started for adapters."""
    if request.param != "sglang":
        with OPENERS[request.param](tmp_path_factory.mktemp(request.param)) as opened:
            yield opened
        return
    lora = SglangLora(rank=4, target_modules=("q_proj", "v_proj"), num_versions=3)
    # Not drawing by seed: SGLang then has no prefix cache on a CPU.
    with open_sglang(tmp_path_factory.mktemp("sglang"), lora=lora, arguments={}) as opened:
        yield opened


def address_of(target: Target, name: str | None = None) -> EngineAddress:
    """The address as the launch of the server states it."""
    if target.kind == "sglang":
        return EngineAddress(name="engine 0", url=target.url, adapter=name or "policy", names_versions=True)
    return EngineAddress(name="engine 0", url=target.url, adapter=name)


@pytest.fixture
async def engine(target: Target, wire: Wire) -> AsyncIterator[HttpEngine]:
    """The client of a server without adapters, before and after the test."""
    version = str((await wire.get("/model_info"))[1]["weight_version"])
    client = HttpEngine(address_of(target), timeout_s=30)
    yield client
    with suppress(EngineError):
        await client.unload_adapter("policy")
    await client.close()
    body = {"new_version": version, "abort_all_requests": False}
    assert (await wire.post("/update_weight_version", body))[0] == 200


def tensors(scale: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, int]] = {}
    for layer, width in SHAPES.items():
        shapes |= {f"{LAYER}.{layer}.lora_A.weight": (2, 64), f"{LAYER}.{layer}.lora_B.weight": (width, 2)}
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def adapter_update(version: int, scale: float) -> AdapterUpdate:
    """An update whose size of the tensors is `scale`."""
    return update(version, scale=scale)


def update(version: int, *, scale: float = 0.5, **changes: Any) -> AdapterUpdate:
    sent = tensors(scale)
    fields = {
        "name": "policy",
        "version": str(version),
        "config": {"r": 2, "lora_alpha": 4, "target_modules": list(SHAPES)},
        "payload": base64.b64encode(save(sent)).decode(),
        "checksums": {name: checksum(tensor) for name, tensor in sent.items()},
        "sglang_payload": serialize_bytes(sent),
        "sha256": {name: hashlib.sha256(bytes_of(tensor).data).hexdigest() for name, tensor in sent.items()},
        **changes,
    }
    return AdapterUpdate(**fields)


GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


async def test_requests_without_a_name_use_the_newest_version(engine: HttpEngine, wire: Wire, target: Target) -> None:
    before = await wire.generate(PROMPT, max_new_tokens=6, temperature=0.0, ignore_eos=True)
    for version in (7, 8, 9):
        await engine.load_adapter(update(version, num_kept=2))
        await engine.prune_adapter("policy", num_kept=2)
    info = await engine.info()
    assert info["adapters"] == {"policy": ["8", "9"]} and info["weight_version"] == 9
    after, second = await engine.generate(PROMPT, GREEDY, n=2)
    assert set(after.weight_versions) == set(second.weight_versions) == {9}
    if target.kind not in KINDS_WITH_WEIGHTS:
        return
    assert after.logprobs == second.logprobs != [entry[0] for entry in before["meta_info"]["output_token_logprobs"]]
    body = {"input_ids": PROMPT, "lora_path": "policy@8", "sampling_params": {"max_new_tokens": 2}}
    status, answer = await wire.post("/generate", body)
    assert status == 200 and (target.kind == "sglang" or answer["meta_info"]["weight_version"] == "8")


async def test_a_request_keeps_its_version_while_others_are_loaded(engine: HttpEngine, target: Target) -> None:
    if target.kind not in KINDS_WITH_WEIGHTS:
        pytest.skip("only an engine with a model uses the tensors")
    long = replace(GREEDY, max_new_tokens=target.long_answer)
    await engine.load_adapter(update(1, num_kept=2))
    (expected,) = await engine.generate(PROMPT, long)
    started, parts = asyncio.Event(), list[Generation]()

    async def follow() -> None:
        async for part in engine.stream(PROMPT, long):
            parts.append(part)
            started.set()

    request = asyncio.ensure_future(follow())
    await started.wait()
    await engine.load_adapter(update(2, scale=1.5, num_kept=2))
    (newer,) = await engine.generate(PROMPT, GREEDY)
    assert not request.done(), "both versions are in use"
    await request
    # The cache of the prompt, which the versions have in common, is not shared by them.
    assert newer.logprobs != expected.logprobs[: len(newer.logprobs)] and set(newer.weight_versions) == {2}
    last = parts[-1]
    assert last.output_ids == expected.output_ids and set(last.weight_versions) == {1}
    assert last.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_the_prefix_cache_of_sglang_is_that_of_a_version(engine: HttpEngine, wire: Wire, target: Target) -> None:
    if target.kind != "sglang":
        pytest.skip("SGLang reports the cached tokens of a request")
    for version in (1, 2):
        await engine.load_adapter(update(version, scale=0.5 * version, num_kept=2))

    async def cached(name: str) -> int:
        body = {"input_ids": list(range(2, 40)), "lora_path": name, "sampling_params": {"max_new_tokens": 1}}
        return int((await wire.post("/generate", body))[1]["meta_info"]["cached_tokens"])

    names = ("policy@1", "policy@1", "policy@2", "policy@2", "policy@1")
    found = [await cached(name) for name in names]
    assert [number > 0 for number in found] == [False, True, False, True, True], found


async def test_the_adapters_of_two_jobs_do_not_meet(engine: HttpEngine, wire: Wire, target: Target) -> None:
    """Each has the logprobs that it has alone, and the end of one job leaves the requests of the other."""
    if target.kind == "sglang":
        pytest.skip("an engine of SGLang has one job: it knows no abort of one adapter's requests")
    names = ("policy-a-1", "policy-b-2")
    jobs = [HttpEngine(EngineAddress(name="engine 0", url=target.url, adapter=name), timeout_s=30) for name in names]
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    alone = []
    for job, name, scale in zip(jobs, names, (0.5, 1.5), strict=True):
        await job.load_adapter(replace(adapter_update(3, scale), name=name))
        alone.append((await job.generate(PROMPT, params))[0])
    together = await asyncio.gather(*[job.generate(PROMPT, params, n=2) for job in jobs])
    for answers, expected in zip(together, alone, strict=True):
        assert [(each.output_ids, each.logprobs) for each in answers] == [(expected.output_ids, expected.logprobs)] * 2
    if target.kind == "embedded":
        assert alone[0].logprobs != alone[1].logprobs and set(alone[0].weight_versions) == {3}
    await jobs[0].load_adapter(replace(adapter_update(4, 0.7), name=names[0]))
    assert [await job.weight_version() for job in jobs] == [4, 3]
    long = SamplingParams(max_new_tokens=target.long_answer, temperature=0.0, ignore_eos=True)
    running = asyncio.ensure_future(jobs[1].generate(PROMPT, long, rid="train-0"))
    while (await wire.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0:
        await asyncio.sleep(0.01)
    await jobs[0].abort()
    await jobs[0].unload_adapter(names[0])
    with pytest.raises(EngineError, match="lora_path must be a loaded adapter"):
        await jobs[0].generate(PROMPT, params)
    (answer,) = await running
    assert answer.finish_reason == "length" and answer.output_ids[: len(alone[1].output_ids)] == alone[1].output_ids
    await jobs[1].unload_adapter(names[1])
    for job in jobs:
        await job.close()


async def test_names_that_are_not_loaded_and_pickles_are_refused(
    engine: HttpEngine, wire: Wire, target: Target
) -> None:
    body = {"input_ids": PROMPT, "lora_path": "stranger", "sampling_params": {"max_new_tokens": 2}}
    status, answer = await wire.post("/generate", body)
    assert status == 400
    if target.kind == "sglang":
        assert "never been loaded: stranger" in answer["error"]["message"]
        assert (await wire.post("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 400
        return
    assert answer["error"]["field"] == "lora_path"
    wrong: dict[str, Any] = {"lora_name": "policy", "config_dict": {}, "serialized_named_tensors": ["gASVAA=="]}
    status, answer = await wire.post("/load_lora_adapter_from_tensors", wrong)
    assert status == 400 and "load_format must be 'safetensors': SGLang's own format is a pickle" in answer["message"]
    wrong |= {"load_format": "safetensors", "lora_name": "policy@3"}
    status, answer = await wire.post("/load_lora_adapter_from_tensors", wrong)
    assert status == 400 and answer["error"]["field"] == "lora_name"
    assert (await wire.get("/model_info"))[1]["adapters"] == {}
    assert (await wire.post("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 400


async def test_a_damaged_adapter_changes_nothing(engine: HttpEngine, target: Target) -> None:
    if target.kind != "embedded":
        pytest.skip("only an engine with a model reads the tensors; SGLang ends its process if a checksum differs")
    await engine.load_adapter(update(3))
    with pytest.raises(WeightSyncError, match=f"{LAYER}.._proj.lora_[AB].weight must arrive with checksum"):
        await engine.load_adapter(update(4, checksums=dict.fromkeys(tensors(), "0")))
    with pytest.raises(EngineError, match="lora_alpha must be a number above 0, got 0"):
        await engine.load_adapter(update(4, config={"r": 2, "lora_alpha": 0}))
    assert (await engine.info())["adapters"] == {"policy": ["3"]}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(receiver=EngineReceiver()) as server:
        yield server


def test_a_sync_fails_where_an_engine_drops_the_adapter(fake: FakeServer) -> None:
    base = WeightSync(
        RecordingTransport([], streams=True),
        make_engine=lambda address: HttpEngine(address, timeout_s=30),
        group=SenderGroup(rank=0),
        timeout_s=30,
    )
    source = AdapterSource(base_weights=lambda: iter(()), config={"r": 2, "lora_alpha": 4})
    sync = AdapterSync(base, source=source, rank=0)
    sync.connect([EngineAddress(name="engine 0", url=fake.url)])
    sync.push(iter(tensors().items()), 1)
    assert fake.service.adapters == {"policy": ["1"]}
    fake.faults.drops_adapters = True
    with pytest.raises(WeightSyncError, match="engine 0 must hold adapter policy of version 2 after the sync, got"):
        sync.push(iter(tensors().items()), 2)
    sync.close()
