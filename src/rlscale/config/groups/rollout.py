"""Group `rollout`: which engine answers prompts, and how it samples."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


class EngineKind(StrEnum):
    """Servers that can generate."""

    sglang = "sglang"
    embedded = "embedded"
    external = "external"


class UpdateMode(StrEnum):
    """When engines may get new weights."""

    boundary = "boundary"
    in_flight = "in_flight"


class PauseMode(StrEnum):
    """What becomes of the requests that run while weights change."""

    retract = "retract"
    in_place = "in_place"
    abort = "abort"


@dataclass(kw_only=True)
class RolloutConfig(ConfigGroup):
    """Generation of training samples."""

    engine: Annotated[
        EngineKind,
        Field(
            description="Server that generates. `embedded` runs the Hugging Face model in torch and needs nothing else."
        ),
    ] = EngineKind.sglang
    temperature: Annotated[
        float,
        Field(
            gt=0,
            description="Sampling temperature. The trainer divides its logits by it too, so that both see one policy.",
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Nucleus sampling: keep the likeliest tokens of this total mass. 1: off."),
    ] = 1.0
    top_k: Annotated[int, Field(ge=-1, description="Sample among this many likeliest tokens. -1: off.")] = -1
    min_p: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Sample among tokens of at least this share of the likeliest one's probability. 0: off. Like "
            "`rollout.top_p` and `rollout.top_k` it changes which tokens can be drawn; logprobs remain those of the "
            "full distribution, which the trainer computes too.",
        ),
    ] = 0.0
    max_context_len: Annotated[
        int | None,
        Field(gt=0, description="Limit of prompt and response together, in tokens. None: the model's own limit."),
    ] = None
    max_prompt_len: Annotated[
        int | None,
        Field(
            gt=0,
            description="Longer prompts are dropped when the data is loaded, in tokens. None: "
            "`rollout.max_context_len - 1` when that is set, else no limit.",
        ),
    ] = None
    max_response_len: Annotated[int, Field(gt=0, description="Longest response, in tokens.")] = 1024
    stop_token_ids: Annotated[
        list[int] | None,
        Field(description="Token ids that end a response, beside the model's end token. None: only that one."),
    ] = None
    stop: Annotated[
        list[str] | None,
        Field(
            description="Strings that end a response. Its text ends before the string, its tokens end with the one "
            "that completes it. Evaluation uses them too. None: none."
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool,
        Field(
            description="Leave special tokens out of the text that rewards see; the token that ends a response is "
            "never in it. Evaluation does the same."
        ),
    ] = False
    shuffle: Annotated[bool, Field(description="Shuffle the prompts anew in each epoch.")] = False
    seed: Annotated[int, Field(ge=0, description="Seed of the shuffling and of every sample drawn.")] = 42
    max_staleness: Annotated[
        int,
        Field(
            ge=0,
            description="Weight updates by which a token may be older than the weights that are trained. 0: generation "
            "and training take turns. k: up to k rollouts are generated ahead, beside training.",
        ),
    ] = 0
    update_mode: Annotated[
        UpdateMode,
        Field(
            description="`in_flight`: weights change while requests run, and a sample may have tokens of several "
            "versions. `boundary`: engines first finish the requests they have, so that every sample has one version. "
            "Ignored with `rollout.max_staleness=0`."
        ),
    ] = UpdateMode.in_flight
    pause_mode: Annotated[
        PauseMode,
        Field(
            description="What an update in flight does with running requests. `retract`: they go on with their tokens "
            "read anew by the new weights. `in_place`: they go on with the cache of the old weights, which saves that "
            "pass. `abort`: they end, and their groups are generated again."
        ),
    ] = PauseMode.retract
    deterministic: Annotated[
        bool,
        Field(
            description="Answers depend on weights, prompt, parameters and seed alone, whatever else is being "
            "decoded; false is faster when few sequences are left. Embedded engine only."
        ),
    ] = True
    num_slots: Annotated[
        int,
        Field(gt=0, description="Sequences decoded at once per length bucket. Embedded engine only."),
    ] = 64
    timeout_s: Annotated[float, Field(gt=0, description="Time one request may take, in seconds.")] = 600.0
    function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, that makes whole rollouts. None: the loop that "
            "comes with rlscale.",
        ),
    ] = None
    external: Annotated[
        bool,
        Field(description="Sets `rollout.engine=external`: use the servers of `rollout.external_engine_addrs`."),
    ] = False
    external_engine_addrs: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            description="Servers of `rollout.engine=external`, each as `host:port`. They run already; the run neither "
            "starts, restarts nor ends them. None: needed there, else ignored.",
        ),
    ] = None


def mixes_caches(rollout: RolloutConfig) -> bool:
    """Whether tokens of new weights may stand on a cache that old weights computed."""
    overlaps = rollout.max_staleness > 0 and rollout.update_mode == UpdateMode.in_flight
    return overlaps and rollout.pause_mode == PauseMode.in_place
