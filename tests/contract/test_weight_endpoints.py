"""SGLang's contract for updates from disk and tensor, the same for every server."""

import base64
from pathlib import Path

import pytest

from rlscale.weights.buckets import describe_bucket
from rlscale.weights.readers import encode_payload
from tests.contract.conftest import Wire
from tests.contract.long_request import PROMPT, check_paused, start_long
from tests.tiny_model import write_tiny_qwen3

PICKLE = base64.b64encode(b"\x80\x04]\x94.").decode()  # an empty list, as SGLang's clients send it


@pytest.fixture
async def model(wire: Wire, tmp_path: Path) -> Path:
    """A folder with the server's weights (the fake has none). No request runs."""
    # A request counts as running for a moment after its answer, and the flush of an update does not wait.
    assert (await wire.post("/flush_cache?timeout=10", {}))[0] == 200
    path = Path((await wire.get("/model_info"))[1]["model_path"])
    return path if path.is_dir() else write_tiny_qwen3(tmp_path / "model")


@pytest.fixture
async def version(wire: Wire) -> str:
    """The version of the weights before the test, to be restored after it."""
    return str((await wire.get("/model_info"))[1]["weight_version"])


async def restore_version(wire: Wire, version: str) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    assert (await wire.post("/update_weight_version", body))[0] == 200


async def test_loading_a_folder_sets_the_version(wire: Wire, model: Path, version: str) -> None:
    before = await wire.generate(PROMPT, max_new_tokens=8, sampling_seed=1, ignore_eos=True)
    assert (await wire.post("/flush_cache?timeout=10", {}))[0] == 200
    status, answer = await wire.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "43"})
    assert status == 200 and answer["success"] is True and answer["num_paused_requests"] == 0
    assert (await wire.get("/model_info"))[1]["weight_version"] == "43"
    after = await wire.generate(PROMPT, max_new_tokens=8, sampling_seed=1, ignore_eos=True)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "43"
    await restore_version(wire, version)


async def test_a_folder_without_a_version_keeps_the_version(wire: Wire, model: Path, version: str) -> None:
    assert (await wire.post("/update_weights_from_disk", {"model_path": str(model)}))[0] == 200
    assert (await wire.get("/model_info"))[1]["weight_version"] == version


async def test_a_bad_path_is_400_and_changes_nothing(wire: Wire, tmp_path: Path, version: str) -> None:
    body = {"model_path": str(tmp_path / "nothing"), "weight_version": "44"}
    status, answer = await wire.post("/update_weights_from_disk", body)
    assert status == 400 and answer["success"] is False and answer["message"]
    assert (await wire.get("/model_info"))[1]["weight_version"] == version
    assert len((await wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


async def test_paused_requests_continue_with_the_new_weights(wire: Wire, model: Path, version: str) -> None:
    # The request starts with the old weights and ends with the new ones.
    task = await start_long(wire, "load-while-paused")
    assert (await wire.post("/pause_generation", {"mode": "retract"}))[0] == 200
    assert (await wire.post("/flush_cache", {}))[0] == 200
    body = {"model_path": str(model), "weight_version": "45", "flush_cache": True}
    assert (await wire.post("/update_weights_from_disk", body))[0] == 200
    await check_paused(wire, task)
    assert (await wire.post("/continue_generation", {}))[0] == 200
    status, answer = await task
    assert status == 200 and len(answer["output_ids"]) == wire.target.long_answer
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == [version, "45"]
    await restore_version(wire, version)


async def test_tensors_outside_begin_and_end_are_refused(wire: Wire) -> None:
    status, answer = await wire.post("/update_weights_from_tensor", {"serialized_named_tensors": [PICKLE]})
    assert status == 400 and answer["success"] is False


async def test_our_servers_read_no_pickle(wire: Wire) -> None:
    if wire.target.kind == "sglang":
        pytest.skip("SGLang reads pickles")
    assert (await wire.post("/begin_weight_update", {}))[0] == 200
    for load_format in (None, "flattened_bucket", "direct", "my.loader"):
        body = {"serialized_named_tensors": [PICKLE], "load_format": load_format}
        status, answer = await wire.post("/update_weights_from_tensor", body)
        assert status == 400 and "load_format must be 'shared_memory' or 'cuda_ipc'" in answer["message"]
        assert "pickle" in answer["message"]
    assert (await wire.post("/end_weight_update", {}))[0] == 200


async def test_a_payload_our_servers_cannot_read_is_400(wire: Wire) -> None:
    if wire.target.kind == "sglang":
        pytest.skip("SGLang has another format")
    assert (await wire.post("/begin_weight_update", {}))[0] == 200
    unknown_ring = encode_payload({"ring": "rlscale-unknown", "timeout_s": 1}, describe_bucket([]))
    for payloads, message in (
        (["!"], "base64"),
        ([PICKLE], "base64-encoded JSON"),
        ([], "contain one string"),
        ([encode_payload({}, describe_bucket([]))], "must contain the name of its shared-memory ring"),
        ([unknown_ring], "could not be opened"),
    ):
        body = {"serialized_named_tensors": payloads, "load_format": "shared_memory"}
        status, answer = await wire.post("/update_weights_from_tensor", body)
        assert status == 400 and answer["success"] is False and message in answer["message"]
    assert (await wire.post("/end_weight_update", {}))[0] == 200
    assert len((await wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
