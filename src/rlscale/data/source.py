"""The prompts of a run: from files, or from a class of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlscale.config import LossType, RunConfig
from rlscale.config.groups.custom import with_custom
from rlscale.config.hooks import load_hook
from rlscale.config.rules import learns_conversations
from rlscale.data.prompts import FilePromptSource, Learned
from rlscale.errors import ConfigError, Problem
from rlscale.protocols import PromptSource

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
    return source  # type: ignore[no-any-return]


def _learned(config: RunConfig) -> Learned | None:
    if config.algo.loss_type != LossType.sft_loss:
        return None
    return Learned.conversations if learns_conversations(config) else Learned.labels


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=KEY, rule=rule, value=value, fix=fix)])
