"""Built-in rewards under the names of slime, for functions that call them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from inspect import isawaitable
from typing import Any

from rlscale.config import RewardConfig, RewardType
from rlscale.errors import ConfigError, Problem
from rlscale.plugins.sample_view import DocumentSample
from rlscale.plugins.slime_objects import load_function
from rlscale.protocols import Reward
from rlscale.rewards.load_reward import load_reward
from rlscale.rewards.text_graders import boxed_dapo_reward, dapo_reward
from rlscale.types import Prompt, Sample


async def async_rm(args: Any, sample: DocumentSample, **kwargs: Any) -> Any:
    """The reward of one sample: the custom one of the sample or of the run, or the built-in one of `args.rm_type`.

    Raises:
        ConfigError: there is no reward of this type.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return await _value(load_function(path.replace(":", "."))(args, sample, **kwargs))
    kind = sample.metadata.get("rm_type") or args.rm_type
    # In a thread: a reward may compare for seconds, and this is the event loop of generate functions.
    return await _value(await asyncio.to_thread(_load(kind, getattr(args, "rm_url", None)), _to_native(sample)))


async def batched_async_rm(args: Any, samples: Sequence[DocumentSample], **kwargs: Any) -> list[Any]:
    """The rewards of several samples; a custom reward gets the list."""
    if args.custom_rm_path is not None:
        return list(await _value(load_function(args.custom_rm_path.replace(":", "."))(args, samples, **kwargs)))
    return list(await asyncio.gather(*[async_rm(args, sample, **kwargs) for sample in samples]))


def compute_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """Score 1 or -1 of an answer to an integer, as `reward.type=dapo`; `strict_box_verify` reads the last box.

    Raises:
        ValueError: the label is no integer.
    """
    prompt = Prompt(index=0, text="", token_ids=(0,), label=str(ground_truth))
    sample = Sample(index=0, group_index=0, prompt=prompt, seed=0, response=solution_str)
    return boxed_dapo_reward(sample) if strict_box_verify else dapo_reward(sample)


async def _value(found: Any) -> Any:
    return await found if isawaitable(found) else found


@cache
def _load(kind: str | None, url: str | None) -> Reward:
    if kind is None:
        rule = "be set where a function asks for the reward of the run"
        raise ConfigError([Problem(path="reward.type", rule=rule, value="null", fix="choose reward=exact_match")])
    return load_reward(RewardConfig(type=RewardType(kind), url=url))


def _to_native(sample: DocumentSample) -> Sample:
    """The parts of a sample that built-in rewards read."""
    prompt = Prompt(
        index=0,
        text=str(sample.prompt),
        token_ids=tuple(sample.tokens[: len(sample.tokens) - sample.response_length]),
        label=sample.label,
        metadata=sample.metadata,
    )
    native = Sample(index=sample.index or 0, group_index=sample.group_index or 0, prompt=prompt, seed=0)
    native.response = sample.response
    return native
