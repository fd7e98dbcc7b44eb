"""Effects of the pause modes on running requests, and memory release in a pause; the same for every server."""

import asyncio
from pathlib import Path

import pytest

from tests.contract.conftest import Wire
from tests.contract.long_request import PROMPT, check_paused, num_held, pass_steps, start_long, wait_for_arrival
from tests.contract.test_engine_contract import shape
from tests.tiny_model import write_tiny_qwen3


async def pause(wire: Wire, mode: str) -> None:
    assert (await wire.post("/pause_generation", {"mode": mode}))[0] == 200


async def resume(wire: Wire) -> None:
    assert (await wire.post("/continue_generation", {}))[0] == 200


async def wait_until_flushed(wire: Wire) -> None:
    """Returns when no request runs: real SGLang exits if memory is released during a request."""
    assert (await wire.post("/flush_cache?timeout=10", {}))[0] == 200, "a request of an earlier test still runs"


async def set_version(wire: Wire, version: str) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    assert (await wire.post("/update_weight_version", body))[0] == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_update_in_a_pause_is_in_the_version_spans(wire: Wire, mode: str) -> None:
    before = (await wire.get("/model_info"))[1]["weight_version"]
    task = await start_long(wire, f"span-{mode}")
    await pause(wire, mode)
    assert (await wire.post("/begin_weight_update", {}))[0] == 200
    assert (await wire.post("/end_weight_update", {}))[0] == 200
    await set_version(wire, "17")
    await check_paused(wire, task)
    await resume(wire)
    answer = (await task)[1]
    await set_version(wire, before)
    meta = answer["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [before, "17"]
    assert meta["weight_versions"][0]["end"] == meta["weight_versions"][1]["start"] > 0
    assert meta["weight_versions"][1]["end"] == wire.target.long_answer
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_new_requests_wait_in_every_mode(wire: Wire, mode: str) -> None:
    await pause(wire, mode)
    before = await num_held(wire)
    held = asyncio.create_task(wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True, sampling_seed=1))
    await wait_for_arrival(wire, before=before)
    await pass_steps(wire)
    assert not held.done()
    await resume(wire)
    free = await wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True, sampling_seed=1)
    assert shape(await held) == shape(free)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_paused_request_can_be_aborted(wire: Wire, mode: str) -> None:
    task = await start_long(wire, f"abort-{mode}")
    await pause(wire, mode)
    assert (await wire.post("/abort_request", {"rid": f"abort-{mode}"}))[0] == 200
    await resume(wire)
    answer = (await task)[1]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) < wire.target.long_answer
    assert answer["output_ids"] or (mode == "retract" and not wire.target.keeps_retracted)


async def test_cache_memory_is_resumed(wire: Wire) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 2}
    before = await wire.generate(PROMPT, **params)
    for _ in range(2):
        await wait_until_flushed(wire)  # SGLang has answered before it is idle, and ends at a release that is too early
        assert (await wire.post("/release_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
        assert (await wire.get("/health"))[0] == 200
        assert (await wire.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
        assert shape(await wire.generate(PROMPT, **params)) == shape(before)


async def test_retracted_request_survives_a_release(wire: Wire) -> None:
    task = await start_long(wire, "release-retract")
    await pause(wire, "retract")
    assert (await wire.post("/release_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
    await check_paused(wire, task)
    assert (await wire.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
    await resume(wire)
    answer = (await task)[1]
    assert len(answer["output_ids"]) == wire.target.long_answer and answer["meta_info"]["num_retractions"] == 1


async def test_weights_memory_is_resumed_with_the_weights(wire: Wire, tmp_path: Path) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 2}
    before = await wire.generate(PROMPT, **params)
    await wait_until_flushed(wire)
    info = (await wire.get("/model_info"))[1]
    folder = Path(info["model_path"])  # the fake has none
    model = folder if folder.is_dir() else write_tiny_qwen3(tmp_path / "model")
    assert (await wire.post("/release_memory_occupation", {}))[0] == 200
    assert (await wire.get("/health"))[0] == 200
    assert (await wire.post("/resume_memory_occupation", {"tags": ["weights"]}))[0] == 200
    body = {"model_path": str(model), "weight_version": info["weight_version"]}
    assert (await wire.post("/update_weights_from_disk", body))[0] == 200
    assert (await wire.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
    assert shape(await wire.generate(PROMPT, **params)) == shape(before)
