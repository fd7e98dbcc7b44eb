"""Streamed answers, the same for every server."""

import asyncio
from typing import Any

from tests.contract.conftest import Wire
from tests.contract.long_request import PROMPT, num_held
from tests.contract.test_engine_contract import shape

PARAMS: dict[str, Any] = {"max_new_tokens": 20, "sampling_seed": 3, "ignore_eos": True}


def body_of(**sampling: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}


async def test_every_event_contains_all_tokens_so_far_and_the_last_is_the_answer(wire: Wire) -> None:
    whole = await wire.generate(PROMPT, **PARAMS)
    *events, end = [event async for event in wire.stream(body_of(**PARAMS))]
    assert end == "[DONE]" and len(events) > 1
    for event in events[:-1]:
        num = len(event["output_ids"])
        assert event["meta_info"]["finish_reason"] is None and event["meta_info"]["completion_tokens"] == num
        assert shape(event) == (shape(whole)[0][:num], shape(whole)[1][:num])
        assert whole["text"].startswith(event["text"])
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(set(lengths)) and lengths[0] < 20
    last = events[-1]
    assert shape(last) == shape(whole) and last["text"] == whole["text"]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    assert last["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]
    assert "index" not in last


async def test_several_answers_have_an_index(wire: Wire) -> None:
    step = int(wire.target.splits_seeds)  # 0: all samples use one seed
    alone = [await wire.generate(PROMPT, **{**PARAMS, "sampling_seed": 3 + j * step}) for j in range(3)]
    last: dict[int, Any] = {}
    async for event in wire.stream(body_of(**PARAMS, n=3)):
        if event != "[DONE]":
            last[event["index"]] = event
    assert [shape(last[j])[0] for j in range(3)] == [shape(a)[0] for a in alone]
    if wire.target.batch_invariant:
        assert [shape(last[j]) for j in range(3)] == [shape(a) for a in alone]
    body = {"input_ids": [PROMPT, [8, 9]], "sampling_params": PARAMS, "return_logprob": True}
    last = {event["index"]: event async for event in wire.stream(body) if event != "[DONE]"}
    assert shape(last[0])[0] == shape(alone[0])[0]
    assert shape(last[1])[0] == shape(await wire.generate([8, 9], **PARAMS))[0]


async def test_text_that_may_become_a_stop_string_is_held_back(wire: Wire) -> None:
    whole = await wire.generate(PROMPT, **PARAMS)
    short = await wire.generate(PROMPT, **{**PARAMS, "max_new_tokens": 9})
    stop = whole["text"][len(short["text"]) :][:4]
    *events, _ = [event async for event in wire.stream(body_of(**PARAMS, stop=stop))]
    last = events[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert last["text"] == whole["text"][: whole["text"].find(stop)]
    assert all(last["text"].startswith(event["text"]) for event in events)


async def test_disconnected_client_of_a_stream_ends_the_request(wire: Wire) -> None:
    params = {**PARAMS, "max_new_tokens": wire.target.long_answer}
    events = wire.stream(body_of(**params))
    assert (await anext(events))["meta_info"]["finish_reason"] is None
    await events.aclose()
    while await num_held(wire):
        await asyncio.sleep(0.01)


async def test_abort_ends_a_stream_with_the_tokens_so_far(wire: Wire) -> None:
    params = {**PARAMS, "max_new_tokens": wire.target.long_answer}
    events = wire.stream({**body_of(**params), "rid": "stream-to-abort"})
    await anext(events)
    assert (await wire.post("/abort_request", {"rid": "stream-to-abort"}))[0] == 200
    remaining = [event async for event in events]
    assert remaining[-1] == "[DONE]"
    last = remaining[-2]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < wire.target.long_answer
