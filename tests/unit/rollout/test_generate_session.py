"""Answers that an abort reaches at their last token: they are complete, and nothing continues them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.types import EngineAddress, Generation, SamplingParams

EOS, STOP = 9, 8


class AbortingEngine:
    """Aborts an answer after these tokens."""

    address = EngineAddress(name="engine 0", url="http://engine")

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    async def generate(self, *args: Any, **options: Any) -> list[Generation]:
        number = len(self._ids)
        columns: dict[str, Any] = {"logprobs": [-1.0] * number, "weight_versions": [0] * number}
        return [Generation(output_ids=self._ids, finish_reason="abort", text="", engine="engine 0", **columns)]


@pytest.mark.parametrize(
    ("ids", "params", "round_tokens", "expected"),
    [
        ([], {}, None, "abort"),
        ([1, 2], {}, None, "abort"),
        ([1, 2, 3, 4], {}, None, "length"),
        ([1, EOS], {}, None, "stop"),
        ([1, 2, 3, EOS], {}, None, "stop"),
        ([1, EOS], {"ignore_eos": True}, None, "abort"),
        ([1, STOP], {}, None, "abort"),
        ([1, STOP], {"stop_token_ids": (STOP,)}, None, "stop"),
        ([1, 2], {}, 2, "abort"),  # the end of a round, which the next one continues
        ([1, EOS], {}, 2, "stop"),
    ],
)
async def test_an_answer_that_is_aborted_at_its_last_token_is_complete(
    ids: list[int], params: dict[str, Any], round_tokens: int | None, expected: str
) -> None:
    session = GenerateSession(
        params=SamplingParams(max_new_tokens=4, **params),
        rid="r",
        pool=EnginePool([AbortingEngine(ids)]),  # type: ignore[list-item]
        versions=(0, 0),
        tokenizer=SimpleNamespace(eos_token_id=EOS),  # type: ignore[arg-type]
        round_tokens=round_tokens,
    )
    answer = await session.generate([5])
    assert (answer.finish_reason, answer.output_ids) == (expected, ids)
