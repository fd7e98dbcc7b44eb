"""SGLang's HTTP API as rlscale uses it, the same for every server."""

import asyncio
from typing import Any

import pytest

from tests.contract.conftest import Wire
from tests.contract.long_request import PROMPT, check_paused, num_held, pass_steps, start_long, wait_for_arrival

DISCONNECT_TIMEOUT_S = 30


def shape(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of an answer."""
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def test_health_and_description(wire: Wire) -> None:
    assert (await wire.get("/health"))[0] == 200
    assert (await wire.get("/health_generate"))[0] == 200
    status, info = await wire.get("/model_info")
    assert status == 200 and info["is_generation"] is True and "weight_version" in info
    assert (await wire.get("/server_info"))[0] == 200
    status, models = await wire.get("/v1/models")
    assert status == 200 and models["data"][0]["object"] == "model"
    status, loads = await wire.get("/v1/loads")
    assert status == 200 and loads["loads"]
    assert (await wire.get("/get_load"))[0] == 404


async def test_answer_has_the_fields_of_the_contract(wire: Wire) -> None:
    answer = await wire.generate(PROMPT, max_new_tokens=6, ignore_eos=True, sampling_seed=1)
    meta = answer["meta_info"]
    assert isinstance(answer["text"], str)
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert isinstance(meta["weight_version"], str)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["id"] and meta["e2e_latency"] >= 0


async def test_logprobs_only_on_request(wire: Wire) -> None:
    status, answer = await wire.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert status == 200 and "output_token_logprobs" not in answer["meta_info"]


async def test_seed_decides_the_answer(wire: Wire) -> None:
    params = {"max_new_tokens": 12, "ignore_eos": True}
    first = await wire.generate(PROMPT, sampling_seed=7, **params)
    again = await wire.generate(PROMPT, sampling_seed=7, **params)
    other = await wire.generate(PROMPT, sampling_seed=8, **params)
    assert shape(first) == shape(again)
    assert first["output_ids"] != other["output_ids"]


async def test_sample_j_of_n_is_the_sample_of_seed_plus_j(wire: Wire) -> None:
    if not wire.target.splits_seeds:
        pytest.skip("this server uses one seed for all n samples; the client sends them as a batch")
    together = await wire.generate(PROMPT, max_new_tokens=8, sampling_seed=40, n=4)
    alone = [await wire.generate(PROMPT, max_new_tokens=8, sampling_seed=40 + j) for j in range(4)]
    assert [shape(a) for a in together] == [shape(a) for a in alone]


async def test_greedy_ignores_the_seed(wire: Wire) -> None:
    answers = [await wire.generate(PROMPT, max_new_tokens=8, temperature=0, sampling_seed=s) for s in (1, 2)]
    assert shape(answers[0]) == shape(answers[1])


async def test_stop_token_ends_the_answer_and_stays_in_it(wire: Wire) -> None:
    full = (await wire.generate(PROMPT, max_new_tokens=10, sampling_seed=3, ignore_eos=True))["output_ids"]
    stop = full[4]
    cut = await wire.generate(PROMPT, max_new_tokens=10, sampling_seed=3, stop_token_ids=[stop])
    expected = full[: full.index(stop) + 1]
    assert cut["output_ids"] == expected
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    ignored = await wire.generate(PROMPT, max_new_tokens=10, sampling_seed=3, stop_token_ids=[stop], ignore_eos=True)
    assert ignored["output_ids"] == full


async def test_batch_of_prompts(wire: Wire) -> None:
    body = {"input_ids": [PROMPT, [8, 9]], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}
    status, answers = await wire.post("/generate", body)
    assert status == 200 and [a["meta_info"]["prompt_tokens"] for a in answers] == [4, 2]
    assert answers[1]["output_ids"] == (await wire.generate([8, 9], max_new_tokens=3, sampling_seed=1))["output_ids"]


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [5, 100_000]}, "input_ids[1]"),
    ({"input_ids": [-1]}, "input_ids[0]"),
    ({"input_ids": ["5"]}, "input_ids[0]"),
    ({"input_ids": [5.5]}, "input_ids[0]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({"input_ids": "567"}, "input_ids"),
    ({"input_ids": [5], "sampling_params": {"max_new_tokens": 100_000}}, "input_ids"),
    ({"input_ids": [5], "sampling_params": []}, "sampling_params"),
    ({"input_ids": [5], "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"input_ids": [5], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
    ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    ({"input_ids": [5], "sampling_params": {"top_p": 1.5}}, "sampling_params.top_p"),
    ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
    ({"input_ids": [5], "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"input_ids": [5], "sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
    ({"input_ids": [5], "sampling_params": {"stop_token_ids": 4}}, "sampling_params.stop_token_ids"),
    ({"input_ids": [5], "return_logprob": "yes"}, "return_logprob"),
]


@pytest.mark.parametrize(("body", "field"), BAD_REQUESTS, ids=[str(i) for i in range(len(BAD_REQUESTS))])
async def test_bad_request_is_400_naming_the_field(wire: Wire, body: dict[str, Any], field: str) -> None:
    if not wire.target.refuses_by_name:
        pytest.skip("this server has other error texts, and an id outside the vocabulary crashes it")
    status, answer = await wire.post("/generate", body)
    assert status == 400
    assert field in answer["error"]["message"]
    assert (await wire.get("/health"))[0] == 200
    assert len((await wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


async def test_body_that_is_not_json_is_400(wire: Wire) -> None:
    async with wire._session.post(wire.target.url + "/generate", data=b"{oops") as response:
        assert response.status == 400


async def test_unknown_top_level_key_is_accepted(wire: Wire) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "something_new": 1}
    assert (await wire.post("/generate", body))[0] == 200


async def test_abort_returns_the_tokens_so_far(wire: Wire) -> None:
    task = await start_long(wire, "to-abort")
    other = await start_long(wire, "to-keep")
    assert (await wire.post("/abort_request", {"rid": "to-abort"}))[0] == 200
    status, answer = await task
    assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < wire.target.long_answer
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    status, kept = await other
    assert len(kept["output_ids"]) == wire.target.long_answer
    assert kept["output_ids"][: len(answer["output_ids"])] == answer["output_ids"]


async def test_abort_all(wire: Wire) -> None:
    tasks = [await start_long(wire, f"all-{i}") for i in range(2)]
    assert (await wire.post("/abort_request", {"abort_all": True}))[0] == 200
    for task in tasks:
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_live_rid_may_not_be_used_again(wire: Wire) -> None:
    task = await start_long(wire, "twice")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "rid": "twice"}
    status, answer = await wire.post("/generate", body)
    assert status == 400 and "twice" in answer["error"]["message"]
    assert len((await task)[1]["output_ids"]) == wire.target.long_answer


async def test_pause_abort_returns_partial_answers_and_queues_new_requests(wire: Wire) -> None:
    task = await start_long(wire, "pause-abort")
    assert (await wire.post("/pause_generation", {"mode": "abort"}))[0] == 200
    status, answer = await task
    assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort"
    before = await num_held(wire)
    held = asyncio.create_task(wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True))
    await wait_for_arrival(wire, before=before)
    await pass_steps(wire)
    assert not held.done()
    assert (await wire.post("/continue_generation", {}))[0] == 200
    assert len((await held)["output_ids"]) == 2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_paused_requests_continue(wire: Wire, mode: str) -> None:
    task = await start_long(wire, f"pause-{mode}")
    assert (await wire.post("/pause_generation", {"mode": mode}))[0] == 200
    assert (await wire.post("/flush_cache", {}))[0] == (200 if mode == "retract" else 400)
    await check_paused(wire, task)
    assert (await wire.post("/continue_generation", {}))[0] == 200
    status, answer = await task
    assert status == 200 and len(answer["output_ids"]) == wire.target.long_answer
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_unknown_pause_mode_is_400(wire: Wire) -> None:
    assert (await wire.post("/pause_generation", {"mode": "sleep"}))[0] == 400


async def test_flush_is_refused_while_requests_are_live(wire: Wire) -> None:
    # SGLang counts a request as running for a short time after its answer: here one of an earlier test.
    assert (await wire.post("/flush_cache?timeout=10", {}))[0] == 200
    task = await start_long(wire, "flush")
    status, answer = await wire.post("/flush_cache", {})
    assert status == 400 and "Flush cache failed" in str(answer)
    assert (await wire.post("/flush_cache?timeout=60", {}))[0] == 200, "it waits for running requests until the timeout"
    assert len((await task)[1]["output_ids"]) == wire.target.long_answer


@pytest.mark.parametrize("timeout", ["-1", "soon"])
async def test_an_invalid_flush_timeout_is_refused(wire: Wire, timeout: str) -> None:
    assert (await wire.post(f"/flush_cache?timeout={timeout}", {}))[0] in (400, 422)


async def test_version_is_on_every_answer_and_token(wire: Wire) -> None:
    before = (await wire.get("/model_info"))[1]["weight_version"]
    task = await start_long(wire, "versions")
    status, answer = await wire.post("/update_weight_version", {"new_version": "41", "abort_all_requests": False})
    assert status == 200 and answer["success"] is True
    spans = (await task)[1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, "41"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == wire.target.long_answer
    assert (await wire.get("/model_info"))[1]["weight_version"] == "41"
    assert (await wire.post("/update_weight_version", {"new_version": before}))[0] == 200


async def test_weight_update_outside_begin_and_end_is_refused(wire: Wire) -> None:
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "none", "load_format": "flattened_bucket"}
    status, answer = await wire.post("/update_weights_from_distributed", body)
    assert status == 400 and answer["success"] is False
    assert (await wire.post("/end_weight_update", {}))[0] == 400
    assert (await wire.post("/begin_weight_update", {}))[0] == 200
    assert (await wire.post("/end_weight_update", {}))[0] == 200


async def test_checksums_by_name(wire: Wire) -> None:
    status, answer = await wire.post("/weights_checker", {"action": "checksum"})
    assert status == 200 and "model.embed_tokens.weight" in answer["ranks"][0]["checksums"]
    assert (await wire.post("/weights_checker", {"action": "shuffle"}))[0] == 400


async def test_many_requests_at_once(wire: Wire) -> None:
    prompts = [[2 + i % 90, 3 + i % 50][: 1 + i % 2] for i in range(120)]
    answers = await asyncio.gather(
        *(wire.generate(p, max_new_tokens=1 + i % 7, ignore_eos=True, n=2) for i, p in enumerate(prompts))
    )
    for i, pair in enumerate(answers):
        assert [len(a["output_ids"]) for a in pair] == [1 + i % 7] * 2


async def test_disconnected_client_does_not_affect_others(wire: Wire) -> None:
    task = await start_long(wire, "disconnected")
    task.task.cancel()
    await asyncio.gather(task.task, return_exceptions=True)
    async with asyncio.timeout(DISCONNECT_TIMEOUT_S):  # on a busy machine the server may notice it seconds later
        while await num_held(wire):
            await asyncio.sleep(0.01)
    assert len((await wire.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
