"""Sampling parameters of SGLang's requests: names, types and bounds of the entries of `rollout.sampling_params`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rlscale.config.passthrough.recorded import LibraryArguments
from rlscale.config.passthrough.sglang_args import load_arguments

RECORDED = Path(__file__).with_name("sglang_sampling_params.json")
CLASSES = ("sglang.srt.sampling.sampling_params:SamplingParams",)

_INTERNAL = "remove it: SGLang sets it itself"
RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "set rollout.max_response_len",
        "temperature": "set rollout.temperature",
        "top_p": "set rollout.top_p",
        "top_k": "set rollout.top_k",
        "min_p": "set rollout.min_p",
        "stop": "set rollout.stop",
        "stop_token_ids": "set rollout.stop_token_ids",
        "skip_special_tokens": "set rollout.skip_special_tokens",
        "sampling_seed": "set rollout.seed",
        "n": "set batch.n_samples_per_prompt",
        "beam_width": "remove it: the responses of a beam search are not samples of the policy",
        "watermark": "remove it: it changes the sampled tokens, and not the logprobs that the engine reports",
        "stream_interval": "remove it: responses are not streamed",
        "ebnf_full_assistant": _INTERNAL,
        "is_normalized": _INTERNAL,
        "stop_regex_max_len": _INTERNAL,
        "stop_regex_strs": _INTERNAL,
        "stop_str_max_len": _INTERNAL,
        "stop_strs": _INTERNAL,
    }
)
"""Parameters that rlscale sets, or that cannot work in a run, with the advice for each."""

EMBEDDED = (
    "frequency_penalty",
    "ignore_eos",
    "min_new_tokens",
    "no_stop_trim",
    "presence_penalty",
    "repetition_penalty",
    "spaces_between_special_tokens",
)
"""Parameters that the embedded engine supports."""

DROPPED_BY_ROUTER = ("custom_params", "logit_bias", "spaces_between_special_tokens", "stop_regex", "structural_tag")
"""Parameters that sglang-router 0.3.2 does not pass on to the engine."""

CHANGES_DISTRIBUTION = (
    "custom_params",
    "ebnf",
    "frequency_penalty",
    "json_schema",
    "logit_bias",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "structural_tag",
)
"""Parameters with which the engine samples from another distribution than the trainer computes."""

NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
)
"""Values of penalties that have no effect."""

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"frequency_penalty": (-2.0, 2.0), "presence_penalty": (-2.0, 2.0), "repetition_penalty": (0.01, 2.0)}
)
"""Smallest and largest value. SGLang accepts repetition penalties down to 0, which would divide by 0."""


def load_parameters(python: str | None) -> LibraryArguments:
    """The parameters of the SGLang in `sglang.python`; those of the tested version when none is installed."""
    return load_arguments(python, recorded=RECORDED, classes=CLASSES, kind="sampling_params")
