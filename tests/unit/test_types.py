"""Sampling parameters: their JSON object, and the part of the context that is left for a response."""

import pytest

from rlscale.types import SamplingParams, fit_context


def test_parameters_without_effect_are_not_sent() -> None:
    wire = SamplingParams(max_new_tokens=4).to_wire()
    assert wire == {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": False}


def test_penalties_and_other_parameters_are_sent() -> None:
    params = SamplingParams(max_new_tokens=4, max_context_len=9).with_values(
        {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": -0.5, "regex": "a+", "ebnf": None}
    )
    plain = SamplingParams(max_new_tokens=4).to_wire()
    assert params.to_wire().items() - plain.items() == {
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("regex", "a+"),
    }
    assert params.has_penalties and not SamplingParams(max_new_tokens=4).has_penalties
    assert params.with_values({"ignore_eos": True}).others == {"regex": "a+"}


@pytest.mark.parametrize(
    ("context", "num_input_tokens", "least", "expected"),
    [
        (None, 1000, 0, (8, 0)),
        (20, 12, 0, (8, 0)),  # exactly fits
        (20, 13, 0, (7, 0)),
        (20, 19, 6, (1, 1)),
        (20, 14, 6, (6, 6)),
        (None, 5, 9, (8, 8)),
    ],
)
def test_a_response_fits_into_the_context(
    context: int | None, num_input_tokens: int, least: int, expected: tuple[int, int]
) -> None:
    params = SamplingParams(max_new_tokens=8, min_new_tokens=least, max_context_len=context)
    fitted = fit_context(params, num_input_tokens)
    assert (fitted.max_new_tokens, fitted.min_new_tokens) == expected
    assert fitted.with_values({"max_new_tokens": 8, "min_new_tokens": least}) == params


def test_an_input_without_room_for_a_response_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="20 input tokens must be fewer than 20"):
        fit_context(SamplingParams(max_new_tokens=8, max_context_len=20), 20)
