"""Differences between two configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlscale.config.problems import show
from rlscale.config.serialize import flatten

UNSET = "(not set)"
RUN_NAMES = ("run.name", "run.dir", "run.experiment", "run.overrides", "run.config_dir", "checkpoint.save")
"""Names and folders, which differ between any two runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One key with different values; UNSET if one side lacks the key."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {show(self.before)} -> {show(self.after)}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any], *, names: bool = False) -> list[Difference]:
    """Every key whose value differs, in the order of the groups.

    Args:
        before, after: nested values.
        names: include the run's name and folders, which always differ.
    """
    # dict.fromkeys below keeps the order of the groups and removes duplicates.
    old, new = dict(flatten(before)), dict(flatten(after))
    return [
        Difference(key=key, before=old.get(key, UNSET), after=new.get(key, UNSET))
        for key in dict.fromkeys([*old, *new])
        if old.get(key, UNSET) != new.get(key, UNSET) and (names or key not in RUN_NAMES)
    ]
