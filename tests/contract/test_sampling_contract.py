"""Finish reasons and sampling parameters, the same for every server."""

import math
from typing import Any

import pytest

from tests.contract.conftest import Wire
from tests.contract.long_request import PROMPT
from tests.contract.test_engine_contract import shape

# Without an end token, so that every answer has the maximum length.
LONG: dict[str, Any] = {"max_new_tokens": 24, "sampling_seed": 3, "ignore_eos": True, "skip_special_tokens": False}

NEVER = "|~|~|~|~|~|~"  # characters of the tokenizer: SGLang encodes stop strings


async def text_of(wire: Wire, num_tokens: int) -> str:
    """The text of the first tokens of the answer to `LONG`."""
    answer = await wire.generate(PROMPT, **{**LONG, "max_new_tokens": num_tokens})
    assert len(answer["output_ids"]) == num_tokens
    return str(answer["text"])


async def test_stop_string_ends_the_answer_and_is_trimmed_from_its_text(wire: Wire) -> None:
    full = await wire.generate(PROMPT, **LONG)
    stop = (await text_of(wire, 8)).removeprefix(await text_of(wire, 5))  # of three tokens
    assert stop
    cut = await wire.generate(PROMPT, **LONG, stop=[NEVER, stop])
    num = len(cut["output_ids"])
    assert num <= 8 and cut["output_ids"] == full["output_ids"][:num]
    assert shape(cut)[1] == shape(full)[1][:num]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["text"] == full["text"][: full["text"].find(stop)]
    assert stop in await text_of(wire, num) and stop not in await text_of(wire, num - 1)
    kept = await wire.generate(PROMPT, **LONG, stop=stop, no_stop_trim=True)
    assert kept["output_ids"] == cut["output_ids"] and kept["text"] == cut["text"] + stop


async def test_stop_string_inside_a_token(wire: Wire) -> None:
    text = await text_of(wire, 24)
    stop = text[-1]
    cut = await wire.generate(PROMPT, **LONG, stop=stop)
    assert cut["text"] == text[: text.find(stop)]
    assert stop in await text_of(wire, len(cut["output_ids"]))


async def test_stop_string_that_never_comes(wire: Wire) -> None:
    plain = await wire.generate(PROMPT, **LONG)
    assert shape(await wire.generate(PROMPT, **LONG, stop=[NEVER])) == shape(plain)


async def test_stop_token_is_in_the_text_only_on_request(wire: Wire) -> None:
    full = await wire.generate(PROMPT, **LONG)
    params = {**LONG, "ignore_eos": False, "stop_token_ids": [full["output_ids"][5]]}
    cut, kept = [await wire.generate(PROMPT, **params, no_stop_trim=trim) for trim in (False, True)]
    num = len(cut["output_ids"])
    assert cut["output_ids"] == kept["output_ids"] == full["output_ids"][:num]
    assert kept["text"] == await text_of(wire, num)
    assert num == 1 or cut["text"].strip() == (await text_of(wire, num - 1)).strip()


async def test_special_tokens_are_in_the_text_only_on_request(wire: Wire) -> None:
    # An ignored end token is the most likely special token in an answer.
    for seed in range(200):
        params = {"max_new_tokens": 40, "sampling_seed": seed, "temperature": 3.0, "ignore_eos": True}
        shown = await wire.generate(PROMPT, **params, skip_special_tokens=False)
        hidden = await wire.generate(PROMPT, **params, skip_special_tokens=True)
        assert shown["output_ids"] == hidden["output_ids"]
        if 1 in shown["output_ids"]:
            assert len(hidden["text"]) < len(shown["text"])
            return
        assert 0 in shown["output_ids"] or hidden["text"] == shown["text"]
    raise AssertionError("no answer contained a special token")


async def test_end_token_is_not_drawn_before_min_new_tokens(wire: Wire) -> None:
    full = await wire.generate(PROMPT, **LONG)
    early = full["output_ids"][2]
    params = {**LONG, "ignore_eos": False, "stop_token_ids": [early]}
    free = await wire.generate(PROMPT, **params)
    assert len(free["output_ids"]) <= 3
    held = await wire.generate(PROMPT, **params, min_new_tokens=12)
    assert early not in held["output_ids"][:12] and 1 not in held["output_ids"][:12]
    assert len(held["output_ids"]) >= 12


async def test_min_p_restricts_the_draw_and_not_the_logprobs(wire: Wire) -> None:
    if not wire.target.has_min_p:
        pytest.skip("this server cannot draw with min_p and a seed")
    params = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 2.0}
    plain = [await wire.generate(PROMPT, **params, sampling_seed=seed) for seed in range(40)]
    narrow = [await wire.generate(PROMPT, **params, sampling_seed=seed, min_p=0.5) for seed in range(40)]
    drawn = {shape(a)[0][0]: shape(a)[1][0] for a in narrow}
    best = max(drawn.values())
    # Those that remain have at least half the probability of the likeliest one ...
    assert all(logprob >= best + math.log(0.5) - 1e-4 for logprob in drawn.values())
    assert len(drawn) < len({shape(a)[0][0] for a in plain})
    # ... and it is their probability in the full distribution.
    known = {shape(a)[0][0]: shape(a)[1][0] for a in plain}
    common = known.keys() & drawn.keys()
    assert common and all(abs(known[t] - drawn[t]) < 1e-4 for t in common)


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_new_tokens": -1}, "min_new_tokens"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
    ({"stop": ["a"] * 33}, "stop"),
]


@pytest.mark.parametrize(("params", "field"), BAD_PARAMS, ids=[str(i) for i in range(len(BAD_PARAMS))])
async def test_bad_parameter_is_400_naming_it(wire: Wire, params: dict[str, Any], field: str) -> None:
    status, answer = await wire.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 400 and field in answer["error"]["message"]
