"""Loading of adapters over HTTP, the same for the servers of this package."""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import EngineAddress, SamplingParams
from rlscale.weight_types import AdapterUpdate
from rlscale.weights.adapter_sync import AdapterSource, AdapterSync
from rlscale.weights.receiver import EngineReceiver
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from tests.contract.conftest import Target, Wire
from tests.unit.weights.test_sync import RecordingTransport

PROMPT = [5, 9, 33]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def ours(target: Target) -> Target:
    if target.kind == "sglang":
        pytest.skip("real SGLang loads adapters only with its argument enable_lora")
    return target


@pytest.fixture
async def engine(ours: Target, wire: Wire) -> AsyncIterator[HttpEngine]:
    """The client of a server without adapters, before and after the test."""
    version = str((await wire.get("/model_info"))[1]["weight_version"])
    client = HttpEngine(EngineAddress(name="engine 0", url=ours.url), timeout_s=30)
    yield client
    await client.close()
    await wire.post("/unload_lora_adapter", {"lora_name": "policy"})
    body = {"new_version": version, "abort_all_requests": False}
    assert (await wire.post("/update_weight_version", body))[0] == 200


def tensors(scale: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{LAYER}.lora_A.weight": (2, 64), f"{LAYER}.lora_B.weight": (64, 2)}
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def adapter_update(version: int, scale: float) -> AdapterUpdate:
    """An update whose size of the tensors is `scale`."""
    sent = tensors(scale)
    checksums = {name: checksum(tensor) for name, tensor in sent.items()}
    return update(version, payload=base64.b64encode(save(sent)).decode(), checksums=checksums)


def update(version: int, **changes: Any) -> AdapterUpdate:
    sent = tensors()
    fields = {
        "name": "policy",
        "version": str(version),
        "config": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
        "payload": base64.b64encode(save(sent)).decode(),
        "checksums": {name: checksum(tensor) for name, tensor in sent.items()},
        **changes,
    }
    return AdapterUpdate(**fields)


async def test_requests_without_a_name_use_the_newest_version(engine: HttpEngine, wire: Wire, ours: Target) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    before = (await engine.generate(PROMPT, params))[0]
    for version in (7, 8, 9):
        await engine.load_adapter(update(version, num_kept=2))
    info = await engine.info()
    assert info["adapters"] == {"policy": ["8", "9"]} and info["weight_version"] == 9
    after = (await engine.generate(PROMPT, params))[0]
    assert set(after.weight_versions) == {9}
    if ours.kind == "embedded":
        assert after.logprobs != before.logprobs
        body = {"input_ids": PROMPT, "lora_path": "policy@8", "sampling_params": {"max_new_tokens": 2}}
        assert (await wire.post("/generate", body))[1]["meta_info"]["weight_version"] == "8"


async def test_the_adapters_of_two_jobs_do_not_meet(engine: HttpEngine, wire: Wire, ours: Target) -> None:
    """Each has the logprobs that it has alone, and the end of one job leaves the requests of the other."""
    names = ("policy-a-1", "policy-b-2")
    jobs = [HttpEngine(EngineAddress(name="engine 0", url=ours.url, adapter=name), timeout_s=30) for name in names]
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    alone = []
    for job, name, scale in zip(jobs, names, (0.5, 1.5), strict=True):
        await job.load_adapter(replace(adapter_update(3, scale), name=name))
        alone.append((await job.generate(PROMPT, params))[0])
    together = await asyncio.gather(*[job.generate(PROMPT, params, n=2) for job in jobs])
    for answers, expected in zip(together, alone, strict=True):
        assert [(each.output_ids, each.logprobs) for each in answers] == [(expected.output_ids, expected.logprobs)] * 2
    if ours.kind == "embedded":
        assert alone[0].logprobs != alone[1].logprobs and set(alone[0].weight_versions) == {3}
    await jobs[0].load_adapter(replace(adapter_update(4, 0.7), name=names[0]))
    assert [await job.weight_version() for job in jobs] == [4, 3]
    long = SamplingParams(max_new_tokens=ours.long_answer, temperature=0.0, ignore_eos=True)
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


async def test_names_that_are_not_loaded_and_pickles_are_refused(engine: HttpEngine, wire: Wire) -> None:
    body = {"input_ids": PROMPT, "lora_path": "stranger", "sampling_params": {"max_new_tokens": 2}}
    status, answer = await wire.post("/generate", body)
    assert status == 400 and answer["error"]["field"] == "lora_path"
    wrong: dict[str, Any] = {"lora_name": "policy", "config_dict": {}, "serialized_named_tensors": ["gASVAA=="]}
    status, answer = await wire.post("/load_lora_adapter_from_tensors", wrong)
    assert status == 400 and "load_format must be 'safetensors': SGLang's own format is a pickle" in answer["message"]
    wrong |= {"load_format": "safetensors", "lora_name": "policy@3"}
    status, answer = await wire.post("/load_lora_adapter_from_tensors", wrong)
    assert status == 400 and answer["error"]["field"] == "lora_name"
    assert (await wire.get("/model_info"))[1]["adapters"] == {}
    assert (await wire.post("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 400


async def test_a_damaged_adapter_changes_nothing(engine: HttpEngine, ours: Target) -> None:
    if ours.kind != "embedded":
        pytest.skip("only an engine with a model reads the tensors")
    await engine.load_adapter(update(3))
    with pytest.raises(WeightSyncError, match=f"{LAYER}.lora_[AB].weight must arrive with checksum"):
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
