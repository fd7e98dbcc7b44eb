"""Cases of the rules about `rollout.sampling_params`; see `cases.CASES` for the columns."""

from typing import Any

from tests.unit.config.rules.valid_config import SGLANG, Values

PENALTY = "rollout.sampling_params.repetition_penalty"


def given(**values: Any) -> Values:
    return {"rollout.sampling_params": values}


CASES: list[tuple[str, Values, str, Values]] = [
    (
        "sampling_params_are_known",
        given(repetition_penaltie=1.1),
        "rollout.sampling_params.repetition_penaltie must be a sampling parameter of SGLang 0.5.23, got 1.1; did you "
        "mean rollout.sampling_params.repetition_penalty?",
        given(repetition_penalty=1.1),
    ),
    (
        "sampling_params_are_known",
        given(temperature=0.5),
        "rollout.sampling_params.temperature must not be set, because rlscale sets it, got 0.5; set "
        "rollout.temperature",
        given(),
    ),
    (
        "sampling_params_are_known",
        given(ignore_eos=1),
        "rollout.sampling_params.ignore_eos must be true or false, got 1; remove it to use SGLang's default",
        given(ignore_eos=True, repetition_penalty=None),
    ),
    (
        "sampling_params_are_known",
        given(beam_width=2),
        "remove it: the responses of a beam search are not samples of the policy",
        given(logit_bias={"3": 1.0}, regex="a+"),
    ),
    (
        "sampling_params_are_within_bounds",
        given(repetition_penalty=2.5),
        f"{PENALTY} must be at least 0.01 and at most 2, got 2.5; set it to 1 for no penalty",
        given(repetition_penalty=2.0),
    ),
    (
        "sampling_params_are_within_bounds",
        given(frequency_penalty=-2.1),
        "rollout.sampling_params.frequency_penalty must be at least -2 and at most 2, got -2.1; set it to 0 for no",
        given(frequency_penalty=-2, presence_penalty=2.0),
    ),
    (
        "min_new_tokens_fits",
        {**given(min_new_tokens=9), "rollout.max_response_len": 8},
        "rollout.sampling_params.min_new_tokens must be at least 0 and at most rollout.max_response_len=8, got 9",
        {**given(min_new_tokens=8), "rollout.max_response_len": 8},
    ),
    (
        "embedded_engine_supports_the_sampling_params",
        given(logit_bias={"3": 1.0}),
        "rollout.sampling_params.logit_bias must not be set with rollout.engine=embedded",
        {**given(logit_bias={"3": 1.0}), **SGLANG},
    ),
    (
        "embedded_engine_supports_the_sampling_params",
        given(regex="a+"),
        "choose rollout=sglang; it supports frequency_penalty, ignore_eos, min_new_tokens, no_stop_trim, ",
        given(
            repetition_penaltie=1.1,  # an error of `sampling_params_are_known` alone
            frequency_penalty=0.1,
            ignore_eos=True,
            min_new_tokens=1,
            no_stop_trim=True,
            presence_penalty=0.1,
            repetition_penalty=1.1,
            spaces_between_special_tokens=False,
            regex=None,
        ),
    ),
    (
        "router_passes_on_the_sampling_params",
        {**given(logit_bias={"3": 1.0}), **SGLANG, "cluster.rollout_num_gpus": 2},
        "router.enabled must be false with rollout.sampling_params.logit_bias, got true; set router.enabled=false",
        {**given(logit_bias={"3": 1.0}), **SGLANG, "cluster.rollout_num_gpus": 2, "router.enabled": False},
    ),
    (
        "true_on_policy_mode_excludes_penalties",
        {**given(repetition_penalty=1.1), "train.true_on_policy_mode": True},
        f"{PENALTY} must not be set with train.true_on_policy_mode, got 1.1; remove it",
        {**given(repetition_penalty=1.0, ignore_eos=True), "train.true_on_policy_mode": True},
    ),
]
