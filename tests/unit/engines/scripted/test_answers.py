"""Ids of a script's answers, and its failures."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlscale.engines.fake import FakeService, Faults
from rlscale.engines.scripted.answers import ScriptedAnswers
from rlscale.engines.scripted.script import ScriptRequest
from rlscale.engines.server.generate_request import GenerateRequest, Limits, Refused
from rlscale.types import SamplingParams


class Letters:
    """One id for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def service(script: Callable[[str, ScriptRequest], Any], *, timeout_s: float = 10.0) -> FakeService:
    answers = ScriptedAnswers(script, Letters(), eos_ids=frozenset({1}), timeout_s=timeout_s)
    return FakeService(Limits(vocab_size=200, max_context_len=50, has_penalties=False), Faults(), answers=answers)


def request(text: str = "ab", *, n: int = 1, **params: Any) -> GenerateRequest:
    ids = tuple(map(ord, text))
    return GenerateRequest(rid="r", input_ids=ids, params=SamplingParams(max_new_tokens=8, **params), n=n)


async def test_an_answer_has_its_end_and_the_seed_of_its_sample() -> None:
    found = await service(lambda text, asked: f"{text}{asked.seed}{asked.index}").generate(
        request(n=2, sampling_seed=5)
    )
    assert [answer.output_ids for answer in found] == [[*map(ord, "ab50"), 1], [*map(ord, "ab61"), 1]]
    assert found[0].finish_reason == {"type": "stop", "matched": 1} and found[0].logprobs == [0.0] * 5


async def test_a_long_answer_is_cut_and_an_ignored_end_repeats() -> None:
    (cut,) = await service(lambda text, asked: "x" * 20).generate(request())
    assert len(cut.output_ids) == 8 and cut.finish_reason == {"type": "length", "length": 8}
    (repeated,) = await service(lambda text, asked: "x").generate(request(ignore_eos=True))
    assert repeated.output_ids == [ord("x"), *[1] * 7]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (lambda text, asked: 1 / 0, "the script failed: .*ZeroDivisionError"),
        (lambda text, asked: 3, "must return a text, got int"),
        (lambda text, asked: exit(1), "the script failed: .*SystemExit"),
    ],
)
async def test_a_failure_is_an_error_of_the_engine(script: Any, error: str) -> None:
    with pytest.raises(Refused, match=error) as caught:
        await service(script).generate(request())
    assert caught.value.status == 500


async def test_a_script_that_never_returns_ends_its_request() -> None:
    released = threading.Event()
    with pytest.raises(Refused, match=r"must answer within 0\.05 s"):
        await service(lambda text, asked: released.wait() or "", timeout_s=0.05).generate(request())
    released.set()
