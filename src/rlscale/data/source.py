"""The prompts of a run: from files, or from a class of the user's own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rlscale.config import RunConfig
from rlscale.config.custom import with_custom
from rlscale.config.hooks import accepts, import_named
from rlscale.data.prompts import FilePromptSource
from rlscale.errors import ConfigError, Problem
from rlscale.protocols import PromptSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.data_source_path"
METHODS = ("take", "state_dict", "load_state_dict")


def open_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """The source of training prompts; one of the user's own is made with the whole config and the tokenizer.

    Raises:
        ConfigError, DataError: it cannot be made from what the config names.
    """
    path = config.data.data_source_path
    if path is None:
        return FilePromptSource(config.data, config.rollout, tokenizer)
    source: Any = with_custom(_load(path), config.custom)(config, tokenizer)
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    if missing:
        fix = f"add {', '.join(missing)} as in rlscale.protocols.PromptSource"
        raise _error("make a prompt source", f"{path}, which makes a {type(source).__name__}", fix)
    return source  # type: ignore[no-any-return]


def check_source(config: RunConfig) -> list[Problem]:
    """What keeps the user's own source from being made, without making it."""
    path = config.data.data_source_path
    if path is None:
        return []
    try:
        _load(path)
    except ConfigError as error:
        return list(error.problems)
    return []


def _load(path: str) -> Any:
    found = import_named(path, key=KEY)
    if not callable(found):
        raise _error("name a class, or a function that makes a source", path, f"it is {type(found).__name__}")
    signature = inspect.signature(found)
    if not accepts(signature, "config", "tokenizer"):
        raise _error("be callable with (config, tokenizer)", path, f"its parameters are {signature}")
    return found


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=KEY, rule=rule, value=value, fix=fix)])
