"""Rewards by row: `rm_type` in the metadata of a row takes precedence over `reward.type`."""

from collections.abc import Callable, Iterable, Mapping
from inspect import isawaitable
from typing import Any

from rlscale.config import RewardType
from rlscale.errors import DataError
from rlscale.types import Prompt, Sample

ROW_KEY = "rm_type"


def find_row_types(prompts: Iterable[Prompt], *, source: str) -> frozenset[str]:
    """The rewards that rows name.

    Args:
        source: file of the prompts, for messages.

    Raises:
        DataError: there is no reward of a name.
    """
    found = set()
    for prompt in prompts:
        name = row_type(prompt)
        if name is not None and name not in list(RewardType):
            known = ", ".join(RewardType)
            row = f"row {prompt.index + 1} of {source}"
            raise DataError(f"{row} must have one of {known} as metadata.{ROW_KEY}, got {name!r}; correct the data")
        if name is not None:
            found.add(name)
    return frozenset(found)


def row_type(prompt: Prompt) -> str | None:
    """The reward that a row names; None: it names none."""
    name = prompt.metadata.get(ROW_KEY)
    return str(name).strip() or None if name is not None else None


class RowReward:
    """The reward that the row of a sample names, else that of the run.

    Args:
        default: of `reward.type`.
        load: from name to reward; called once for each name.
        key: as `reward.key`. A row's reward of one number has this name, and `dapo` is its `score` without a key.
    """

    def __init__(self, default: Callable[[Sample], Any], load: Callable[[str], Any], *, key: str | None) -> None:
        self.func = default  # as of a partial object, so that a caller can find out whether it is async
        self._load, self._key = load, key
        self._loaded: dict[str, Callable[[Sample], Any]] = {}

    def __call__(self, sample: Sample) -> Any:
        name = row_type(sample.prompt)
        if name is None:
            return self.func(sample)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        value = self._loaded[name](sample)
        return self._finish(value) if isawaitable(value) else self._named(value)

    async def _finish(self, value: Any) -> Any:
        return self._named(await value)

    def _named(self, value: Any) -> Any:
        is_mapping = isinstance(value, Mapping)
        if self._key is None and is_mapping and "score" in value:
            return value["score"]
        return value if self._key is None or is_mapping else {self._key: value}
