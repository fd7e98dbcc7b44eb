"""Every sampling key of the configuration reaches the engine."""

from typing import Any

import pytest

from rlscale.config.resolve.defaults import resolve
from rlscale.rollout.generated import eval_params, sampling_params
from rlscale.types import SamplingParams
from tests.unit.config.rules.valid_config import config_with


def params_of(given: dict[str, Any]) -> tuple[SamplingParams, SamplingParams]:
    """Sampling of training and of evaluation with these keys."""
    config, _ = resolve(config_with(given), has_cuda=lambda: False)
    return sampling_params(config.rollout), eval_params(config.eval, config.rollout)


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("temperature", 0.7, "temperature", 0.7),
        ("top_p", 0.9, "top_p", 0.9),
        ("top_k", 5, "top_k", 5),
        ("min_p", 0.1, "min_p", 0.1),
        ("stop", ["</answer>", "\n\n"], "stop", ("</answer>", "\n\n")),
        ("stop_token_ids", [4, 7], "stop_token_ids", (4, 7)),
        ("skip_special_tokens", True, "skip_special_tokens", True),
        ("max_response_len", 7, "max_new_tokens", 7),
        ("seed", 9, "sampling_seed", 9),
        ("max_context_len", 2000, "max_context_len", 2000),
        ("sampling_params", {"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ("sampling_params", {"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ("sampling_params", {"presence_penalty": -0.5}, "presence_penalty", -0.5),
        ("sampling_params", {"min_new_tokens": 3}, "min_new_tokens", 3),
        ("sampling_params", {"ignore_eos": True}, "ignore_eos", True),
        ("sampling_params", {"no_stop_trim": True}, "no_stop_trim", True),
        ("sampling_params", {"spaces_between_special_tokens": False}, "spaces_between_special_tokens", False),
        ("sampling_params", {"logit_bias": {"3": 1.0}, "regex": None}, "others", {"logit_bias": {"3": 1.0}}),
    ],
)
def test_rollout_key_reaches_both(key: str, value: Any, field: str, expected: Any) -> None:
    plain, _ = params_of({})
    assert getattr(plain, field) != expected
    for params in params_of({f"rollout.{key}": value}):
        assert getattr(params, field) == expected


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("temperature", 0.0, "temperature"),
        ("top_p", 0.5, "top_p"),
        ("top_k", 3, "top_k"),
        ("max_response_len", 5, "max_new_tokens"),
        ("min_new_tokens", 2, "min_new_tokens"),
    ],
)
def test_eval_key_reaches_evaluation_alone(key: str, value: Any, field: str) -> None:
    plain, _ = params_of({})
    training, evaluation = params_of({f"eval.{key}": value})
    assert training == plain and getattr(evaluation, field) == value


def test_special_tokens_are_text_by_default() -> None:
    assert params_of({})[0].to_wire()["skip_special_tokens"] is False


def test_eval_min_new_tokens_precedes_that_of_both() -> None:
    given = {"rollout.sampling_params": {"min_new_tokens": 3}}
    assert [params.min_new_tokens for params in params_of({**given, "eval.min_new_tokens": 0})] == [3, 0]
