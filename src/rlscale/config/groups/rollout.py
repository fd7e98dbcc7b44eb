"""Group `rollout`: inference engine and sampling."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup

SGLANG_SPARE_TOKENS = 6
"""Tokens of its context length that an SGLang server reserves: the longest prompt it accepts leaves 1 more than these.
"""


class EngineKind(StrEnum):
    """Inference engines."""

    sglang = "sglang"
    embedded = "embedded"
    external = "external"
    scripted = "scripted"


class UpdateMode(StrEnum):
    """Times at which engines get new weights."""

    boundary = "boundary"
    in_flight = "in_flight"


class PauseMode(StrEnum):
    """Effects of a weight update on running requests."""

    retract = "retract"
    in_place = "in_place"
    abort = "abort"


class WeightPrecision(StrEnum):
    """Precisions below 16 bits of the engines' weights."""

    fp8 = "fp8"
    int4 = "int4"


@dataclass(kw_only=True)
class RolloutConfig(ConfigGroup):
    """Generation of training samples."""

    engine: EngineKind = EngineKind.sglang
    """Inference engine. `embedded` runs the Hugging Face model in torch and needs no extra package. `sglang` starts
    SGLang servers. `external` uses the servers of `rollout.external_engine_addrs`.
    `scripted` answers from `rollout.script_path`, without a model: for trying agents, tools and environments. It needs
    `debug.rollout_only`.
    """

    # Sampling parameters.
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The trainer divides its logits by the same value, so trainer and engine use the same
    policy.
    """

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most probable tokens with this total probability. 1: off."""

    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample from this number of most probable tokens. -1: off."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this fraction of the probability of the most probable token. 0: off.
    `rollout.top_p`, `rollout.top_k` and `rollout.min_p` restrict which tokens can be sampled; logprobs remain those of
    the full distribution, as in the trainer.
    """

    sampling_params: dict[str, Any] = field(default_factory=dict)
    """Further sampling parameters of SGLang by name, e.g. `{repetition_penalty: 1.05}`. Also used for evaluation. The
    embedded engine supports `repetition_penalty`, `frequency_penalty`, `presence_penalty`, `min_new_tokens`,
    `ignore_eos`, `no_stop_trim` and `spaces_between_special_tokens`. Penalties change the distribution that is sampled,
    not the trained one: engines report logprobs after penalties.
    """

    # Lengths and ends of responses.
    max_context_len: Annotated[int | None, Field(gt=1)] = None
    """Maximum length of prompt plus response, in tokens: prompts that leave no token for a response are dropped, and
    the response of a longer prompt ends earlier. Also used for evaluation. None: the limit of the model, and only
    prompts that leave `rollout.max_response_len` tokens are kept.
    """

    max_prompt_len: Annotated[int | None, Field(gt=0)] = None
    """Maximum prompt length, in tokens; longer prompts are dropped when the data is loaded. None:
    `rollout.max_context_len - 1` if that is set, else no limit.
    """

    max_response_len: Annotated[int, Field(gt=0)] = 1024
    """Maximum response length, in tokens: of all turns that the policy generates in a trajectory. A response is shorter
    where its prompt leaves fewer tokens of `rollout.max_context_len`.
    """

    stop_token_ids: list[int] | None = None
    """Token ids that end a response, in addition to the end-of-sequence token of the model. None: no additional ids."""

    stop: list[str] | None = None
    """Strings that end a response. The text ends before the string; the tokens include the one that completes it. Also
    used for evaluation. None: no stop strings.
    """

    skip_special_tokens: bool = False
    """Remove special tokens from the text that rewards receive. The token that ends a response is always removed. Also
    used for evaluation.
    """

    # Order and seed.
    shuffle: bool = False
    """Reshuffle the prompts in each epoch."""

    seed: Annotated[int, Field(ge=0)] = 42
    """Seed for shuffling and for sampling."""

    # Asynchronous generation.
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Maximum age of a trained token, in weight updates. 0: generation and training alternate. k: up to k rollouts are
    generated ahead, concurrently with training.
    """

    update_mode: UpdateMode = UpdateMode.in_flight
    """Moment at which engines get new weights. `in_flight`: while requests run, so a sample can have tokens of several
    weight versions. `boundary`: after the running requests have finished, so every sample has one version. No effect
    with `rollout.max_staleness=0`.
    """

    pause_mode: PauseMode = PauseMode.retract
    """Effect of an in-flight weight update on running requests. `retract`: they continue after the new weights have
    recomputed the KV cache. `in_place`: they continue with the KV cache of the old weights, which saves that prefill.
    `abort`: they end, and their groups are generated again. With `rollout.max_staleness=0` or
    `rollout.update_mode=boundary` only when an engine that `fault_tolerance.enabled` has restarted gets its weights.
    """

    # Embedded engine and requests.
    deterministic: bool = True
    """Make a response depend only on weights, prompt, sampling parameters and seed, and not on the other requests in
    the batch. false is faster when few sequences are left. Only with `rollout.engine=embedded`.
    """

    num_slots: Annotated[int, Field(gt=0)] = 64
    """Maximum number of sequences decoded at once per length bucket. Only with `rollout.engine=embedded`."""

    weight_precision: WeightPrecision | None = None
    """Precision of the linear layers of the engines' weights, quantised by the trainer at each weight sync. `fp8`:
    blocks of 128 x 128 with one scale (DeepSeek's format). `int4`: groups of 32 inputs with one scale
    (compressed-tensors). The embedded engine dequantises them: the numbers of low precision without its speed. The
    engine samples from another policy than is trained: set `algo.use_tis=true`. None: `train.dtype`.
    """

    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Timeout of one request, in seconds."""

    # User code and external engines.
    function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that generates whole rollouts. None: the built-in loop."""

    function_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 7200.0
    """Maximum time of one call of `rollout.function_path` or `eval.function_path`, in seconds; a longer one ends the
    run.
    """

    external: bool = False
    """Same as `rollout.engine=external`: use the servers of `rollout.external_engine_addrs`."""

    external_engine_addrs: Annotated[list[str] | None, Field(min_length=1)] = None
    """Addresses of running servers, each `host:port`. The run does not start, restart or stop them. None: only allowed
    without `rollout.engine=external`. No effect with other engines.
    """

    script_path: Annotated[str | None, Field(min_length=1)] = None
    """Answers of `rollout.engine=scripted`: a function `package.module:name(text, request)` that returns a text, or a
    `.jsonl` file with rows such as `{"prompt": "12+30=", "answers": ["42"]}`. None: only allowed with other engines,
    where it has no effect.
    """


def samples_otherwise(rollout: RolloutConfig) -> bool:
    """Whether the engine's logprobs differ from the trainer's by more than rounding: other weights, or mixed caches."""
    return rollout.weight_precision is not None or mixes_caches(rollout)


def mixes_caches(rollout: RolloutConfig) -> bool:
    """Whether new weights can generate tokens with a KV cache that old weights computed."""
    overlaps = rollout.max_staleness > 0 and rollout.update_mode == UpdateMode.in_flight
    return overlaps and rollout.pause_mode == PauseMode.in_place
