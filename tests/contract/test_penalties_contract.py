"""Penalties and the length of the context, the same for every server."""

from functools import cache
from typing import Any

import pytest

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import SessionFactory
from rlscale.types import EngineAddress, Prompt, SamplingParams
from tests.contract.conftest import Wire
from tests.contract.long_request import PROMPT
from tests.contract.test_engine_contract import shape

PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
]


@cache
def reference_model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def expected_logprobs(folder: str, ids: list[int], *, temperature: float, penalties: dict[str, float]) -> list[float]:
    """Logprobs of the tokens after PROMPT by transformers, with the penalties on the tokens before each."""
    import torch

    with torch.no_grad():
        logits_TV = reference_model(folder)(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].double()
    for position, row in enumerate(logits_TV):
        for token in set(ids[:position]):
            row[token] -= penalties.get("frequency_penalty", 0.0) * ids[:position].count(token)
            row[token] -= penalties.get("presence_penalty", 0.0)
            factor = penalties.get("repetition_penalty", 1.0)
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
    found = torch.log_softmax(logits_TV / temperature, dim=-1)
    return [float(row[token]) for row, token in zip(found, ids, strict=True)]


@pytest.mark.parametrize("penalties", PENALTIES, ids=["+".join(each) for each in PENALTIES])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_logprobs_are_those_after_penalties(wire: Wire, penalties: dict[str, float], temperature: float) -> None:
    params: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "ignore_eos": True, "sampling_seed": 3}
    if wire.target.kind in ("fake", "scripted"):
        body = {"input_ids": PROMPT, "sampling_params": {**params, **penalties}}
        status, answer = await wire.post("/generate", body)
        assert status == 400 and "sampling_params must have no penalties" in answer["error"]["message"]
        return
    folder = (await wire.get("/model_info"))[1]["model_path"]
    ids, logprobs = shape(await wire.generate(PROMPT, **params, **penalties))
    expected = expected_logprobs(folder, ids, temperature=temperature or 1.0, penalties=penalties)
    assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) < 1e-4
    # The penalties have an effect: without them the same tokens have other logprobs, and other tokens are sampled.
    without = expected_logprobs(folder, ids, temperature=temperature or 1.0, penalties={})
    assert max(abs(a - b) for a, b in zip(logprobs, without, strict=True)) > 0.1
    assert shape(await wire.generate(PROMPT, **params))[0] != ids


async def test_a_row_without_penalties_is_not_changed_by_one_with_them(wire: Wire) -> None:
    if wire.target.kind in ("fake", "scripted"):
        pytest.skip("this server has no penalties")
    plain = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = await wire.generate(PROMPT, **plain)
    both = [plain, {**plain, "frequency_penalty": 2.0}, plain]
    body = {"input_ids": [PROMPT] * 3, "sampling_params": both, "return_logprob": True}
    status, answers = await wire.post("/generate", body)
    assert status == 200
    assert [answer["output_ids"] == alone["output_ids"] for answer in answers] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.5),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
    ],
)
async def test_a_penalty_out_of_bounds_is_400_naming_it(wire: Wire, name: str, value: float) -> None:
    status, answer = await wire.post("/generate", {"input_ids": PROMPT, "sampling_params": {name: value}})
    assert status == 400 and name in answer["error"]["message"]


async def test_responses_end_with_the_context(wire: Wire) -> None:
    """Requests for a group are shortened to what the prompt leaves; without this the engine refuses them."""
    context = wire.target.max_context_len
    params = SamplingParams(
        max_new_tokens=context - 1, min_new_tokens=20, ignore_eos=True, sampling_seed=1, max_context_len=context
    )
    engine = HttpEngine(EngineAddress(name="engine 0", url=wire.target.url), timeout_s=60)
    pool = EnginePool([engine])
    version = await engine.weight_version()
    try:
        for number, more in enumerate((1, 2, 7)):
            left = wire.target.spare_tokens + more
            prompt = Prompt(index=number, text="", token_ids=(5, 9) * ((context - left) // 2) + (7,) * (left % 2))
            assert len(prompt.token_ids) == context - left
            session = SessionFactory(pool, params).open(number, (version, version))
            for answer in await session.generate_many(prompt.token_ids, n=2):
                assert 0 < len(answer.output_ids) <= left and answer.finish_reason == "length"
        with pytest.raises(EngineError, match="refused with status 400"):
            await engine.generate(prompt.token_ids, params)
    finally:
        await pool.close()
