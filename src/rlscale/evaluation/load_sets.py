"""Evaluation sets: prompts, sampling, reward and generate function of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlscale.config import RunConfig
from rlscale.config.resolve.eval_sets import EvalSetConfig, eval_sets
from rlscale.config.rules import uses_engines
from rlscale.data.prompts import load_prompts
from rlscale.plugins.args_view import Args
from rlscale.rewards import RunReward, prepare_reward
from rlscale.rewards.row_reward import ROW_KEY
from rlscale.rollout.generated import eval_params
from rlscale.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """Held-out prompts with the name that metrics use, their sampling and their reward."""

    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    num_samples: int = 1
    reward_key: str | None = None  # as `reward.key`
    reward: RunReward | None = None  # of this set alone; None: that of the run
    generate_path: str | None = None  # of a generate function of this set alone; None: that of the run
    about: Mapping[str, Any] | None = None  # settings for the record of an evaluation, as JSON values


def load_eval_sets(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, positions: int | None, args: Args
) -> list[EvalSet]:
    """Reads the prompts of every set, and checks its reward; empty where nothing is evaluated.

    Args:
        positions: maximum sequence length of the model; None: unlimited.
        args: for rewards of the documents.

    Raises:
        ConfigError, DataError: a file or function cannot be used.
    """
    if config.eval.interval is None or not uses_engines(config):
        return []
    return [
        _load(each, config, tokenizer, positions=positions, reward=prepare_set_reward(each, config, args=args))
        for each in eval_sets(config.eval)
    ]


def prepare_set_reward(each: EvalSetConfig, config: RunConfig, *, args: Args) -> RunReward | None:
    """The reward of a set, checked; None: the reward of the run scores it.

    Raises:
        ConfigError: as `prepare_reward`.
    """
    reward = each.reward(config.reward)
    if reward is None:
        return None
    types = () if reward.type is None or reward.custom_path is not None else (reward.type,)
    return prepare_reward(reward, custom=config.custom, args=args, row_types=types)


def set_params(each: EvalSetConfig, config: RunConfig) -> SamplingParams:
    """Sampling of a set: that of the run, of the group `eval`, and of the file."""
    own = each.own
    return eval_params(each.eval, config.rollout).with_values(
        {
            "stop": None if own.stop is None else tuple(own.stop),
            "stop_token_ids": None if own.stop_token_ids is None else tuple(own.stop_token_ids),
            "repetition_penalty": own.repetition_penalty,
            "skip_special_tokens": own.skip_special_tokens,
            "no_stop_trim": own.no_stop_trim,
        }
    )


def _load(
    each: EvalSetConfig,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None,
    reward: RunReward | None,
) -> EvalSet:
    for name in each.own.ignored:
        _logger.warning("%s of the set %s in eval.config is ignored: slime never reads it either", name, each.name)
    params = set_params(each, config)
    # Prompts are filtered by the response length of their set.
    lengths = replace(config.rollout, max_response_len=params.max_new_tokens)
    prompts = load_prompts(each.data(config.data), lengths, tokenizer, positions=positions)
    return EvalSet(
        name=each.name,
        prompts=[with_metadata(prompt, each) for prompt in prompts[: each.eval.max_examples]],
        params=params,
        num_samples=each.eval.n_samples_per_prompt,
        reward_key=each.eval.reward_key,
        reward=reward,
        generate_path=each.own.custom_generate_function_path,
        about=_about(each, params, reward_name(each, config)),
    )


def with_metadata(prompt: Prompt, each: EvalSetConfig) -> Prompt:
    """A prompt with the reward and the metadata that the file sets for all rows of a set."""
    # In this order, as in slime: the file of the set has the last word.
    own = {} if each.own.rm_type is None else {ROW_KEY: str(each.own.rm_type)}
    changes = {**own, **each.own.metadata_overrides}
    return replace(prompt, metadata={**prompt.metadata, **changes}) if changes else prompt


def reward_name(each: EvalSetConfig, config: RunConfig) -> str:
    """The reward of a set for the record of an evaluation."""
    own, run = each.own, config.reward
    if own.custom_rm_path is None and own.rm_type is None and run.functions:
        return ", ".join(run.functions)
    return str(own.custom_rm_path or own.rm_type or run.custom_path or run.type)


def _about(each: EvalSetConfig, params: SamplingParams, reward: str) -> dict[str, Any]:
    return {
        "path": each.path,
        "reward": reward,
        "reward_key": each.eval.reward_key,
        "num_samples": each.eval.n_samples_per_prompt,
        "sampling": {name: value for name, value in params.to_wire().items() if name != "sampling_seed"},
    }
