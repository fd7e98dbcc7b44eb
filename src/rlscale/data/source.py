"""The prompts of a run: from files, or from a class of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlscale.config import LossType, RunConfig
from rlscale.config.groups.custom import with_custom
from rlscale.config.rules import learns_conversations
from rlscale.config.user_functions import load_hook
from rlscale.data.prompts import FilePromptSource, Learned
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.protocols import PromptSource
from rlscale.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.data_source_path"
METHODS = ("take", "state_dict", "load_state_dict")


def open_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, positions: int | None = None
) -> PromptSource:
    """The source of training prompts; one of the user's own is made with the whole config and the tokenizer.

    Prompts that leave no room for a response in the model's `positions` are left out, where that is given; where
    answers are learned, those that do not fit together with theirs.

    Raises:
        ConfigError, DataError: it cannot be made from what the config names.
    """
    path = config.data.data_source_path
    if path is None:
        return FilePromptSource(config.data, config.rollout, tokenizer, positions=positions, learns=_learned(config))
    source: Any = with_custom(load_hook(KEY, path), config.custom)(config, tokenizer)
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    if missing:
        fix = f"add {', '.join(missing)} as in rlscale.protocols.PromptSource"
        raise _error("make a prompt source", f"{path}, which makes a {type(source).__name__}", fix)
    return UserSource(source, path=path)


class UserSource:
    """A source of the user's own, whose answers are checked before they are used."""

    def __init__(self, source: Any, *, path: str) -> None:
        self._source, self._path = source, path

    def __len__(self) -> int:
        return len(self._source)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts. Raises DataError, which names the source, for anything but so many usable ones."""
        given: Any = self._source.take(num_prompts)
        if not isinstance(given, list | tuple):
            raise self._wrong(num_prompts, f"{type(given).__name__}")
        if len(given) != num_prompts:
            raise self._wrong(num_prompts, f"{len(given)}; begin the next epoch where one ends")
        for place, prompt in enumerate(given):
            if not isinstance(prompt, Prompt):
                raise self._wrong(num_prompts, f"{type(prompt).__name__} at place {place}")
            if not prompt.token_ids or not all(isinstance(token, int) and token >= 0 for token in prompt.token_ids):
                found = f"token_ids {str(prompt.token_ids)[:60]} at place {place}; give at least one token id"
                raise self._wrong(num_prompts, found)
        return list(given)

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values. Raises DataError, which names the source, for anything else."""
        state: Any = self._source.state_dict()
        try:
            same = isinstance(state, dict) and json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            same = False
        if not same:
            raise DataError(
                f"state_dict() of {self._path} must return a dict of JSON values, got {str(state)[:60]}; a checkpoint "
                "holds it as JSON, in which keys are strings and there are no tuples"
            )
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)

    def _wrong(self, number: int, found: str) -> DataError:
        rule = f"must return {number} prompts (rlscale.types.Prompt)"
        return DataError(f"take({number}) of {self._path} {rule}, got {found}")


def _learned(config: RunConfig) -> Learned | None:
    if config.algo.loss_type != LossType.sft_loss:
        return None
    return Learned.conversations if learns_conversations(config) else Learned.labels


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=KEY, rule=rule, value=value, fix=fix)])
