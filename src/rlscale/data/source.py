"""Prompt source of a run: files, or a class of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlscale.config import LossType, RunConfig
from rlscale.config.rules import learns_conversations
from rlscale.data.length_filter import Limit
from rlscale.data.prompts import FilePromptSource, SftTarget, prompt_limit
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.plugins.args_view import Args
from rlscale.plugins.load_plugin import load_plugin
from rlscale.protocols import PromptSource
from rlscale.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.data_source_path"
METHODS = ("take", "state_dict", "load_state_dict")


def build_prompt_source(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, positions: int | None = None, args: Args | None = None
) -> PromptSource:
    """Builds the source of training prompts; a source of the user is created with the whole config and the tokenizer.

    Drops prompts that leave no room for a response in the model's `positions`, if given; in supervised training, those
    that exceed it with their answers. A source in slime's form is created with `args` instead; None: made of `config`.

    Raises:
        ConfigError, DataError: the file or class in the config cannot be used.
    """
    path = config.data.data_source_path
    if path is None:
        return FilePromptSource(
            config.data, config.rollout, tokenizer, positions=positions, sft_target=_sft_target(config)
        )
    source = _make_source(config, tokenizer, path=path, args=args)
    # Only the limit of engines; supervised training checks prompts with their answers.
    lengths = replace(config.rollout, max_prompt_len=None)
    return UserSource(source, path=path, limit=None if _sft_target(config) else prompt_limit(lengths, positions))


def _make_source(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, path: str, args: Args | None
) -> PromptSource:
    """A source of the user. Raises ConfigError if it cannot be created, or lacks a method."""
    make = load_plugin(KEY, path, args=args or Args(config), custom=config.custom)
    try:
        source: PromptSource = make(config, tokenizer)
    except Exception as error:  # user code may raise anything
        found = f"{path}, which raised {type(error).__name__}: {error}"
        raise _error("return a prompt source", found, "correct the class") from error
    # Checked here rather than at the first use: a run would only fail at its first checkpoint.
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    if missing:
        fix = f"add {', '.join(missing)} as in rlscale.protocols.PromptSource"
        raise _error("return a prompt source", f"{path}, which returns a {type(source).__name__}", fix)
    return source


class NoPrompts:
    """Source of a run that only evaluates: no file of training prompts is read."""

    def __len__(self) -> int:
        return 0

    def take(self, num_prompts: int) -> list[Prompt]:
        assert num_prompts == 0, "a run that only evaluates draws no prompts"
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: there is no position."""


class UserSource:
    """A prompt source of the user; checks its results before they are used.

    Args:
        limit: maximum length of a prompt; None: any. An engine would refuse a longer one.
    """

    def __init__(self, source: Any, *, path: str, limit: Limit | None = None) -> None:
        self._source, self._path, self._limit = source, path, limit

    def __len__(self) -> int:
        return len(self._source)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts. Raises DataError, naming the source, unless it gets `num_prompts` valid ones."""
        prompts: Any = self._source.take(num_prompts)
        if not isinstance(prompts, list | tuple):
            raise self._error(num_prompts, f"{type(prompts).__name__}")
        if len(prompts) != num_prompts:
            raise self._error(num_prompts, f"{len(prompts)}; continue with the next epoch at the end of one")
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, Prompt):
                raise self._error(num_prompts, f"{type(prompt).__name__} at index {index}")
            if not prompt.token_ids or not all(isinstance(token, int) and token >= 0 for token in prompt.token_ids):
                found = f"token_ids {str(prompt.token_ids)[:60]} at index {index}; return at least one token id"
                raise self._error(num_prompts, found)
            if self._limit is not None and len(prompt.token_ids) > self._limit.tokens:
                rule = f"must be at most {self._limit.name} ({self._limit.tokens} tokens)"
                found = f"{len(prompt.token_ids)} tokens; drop longer prompts in the source"
                raise DataError(f"prompt {prompt.index} of {self._path} {rule}, got {found}")
        return list(prompts)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as JSON values. Raises DataError, naming the source, for anything else."""
        state: Any = self._source.state_dict()
        try:
            same = isinstance(state, dict) and json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            same = False
        if not same:
            raise DataError(
                f"state_dict() of {self._path} must return a dict of JSON values, got {str(state)[:60]}; a checkpoint "
                "stores it as JSON, whose keys are strings and which has no tuples"
            )
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)

    def _error(self, number: int, found: str) -> DataError:
        rule = f"must return {number} prompts (rlscale.types.Prompt)"
        return DataError(f"take({number}) of {self._path} {rule}, got {found}")


def _sft_target(config: RunConfig) -> SftTarget | None:
    if config.algo.loss_type != LossType.sft_loss:
        return None
    return SftTarget.conversations if learns_conversations(config) else SftTarget.labels


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=KEY, rule=rule, value=value, fix=fix)])
