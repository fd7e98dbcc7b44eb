"""Rules between keys, and keys without effect: the entries of the rule modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

Check = Callable[[RunConfig], list[Problem]]
Trace = tuple[list[Problem], frozenset[str]]
"""Problems of a rule, and the paths of the keys that it read to find them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A check between keys. The docstring of the check, if any, explains its name on the page of rules."""

    check: Check

    def __call__(self, config: RunConfig) -> list[Problem]:
        return self.check(config)

    @property
    def name(self) -> str:
        return self.check.__name__

    def trace(self, config: RunConfig) -> Trace:
        """Runs the check and returns its problems and the paths of the keys that it read.

        A check is a function of the keys that it reads, so its problems hold for any value of all other keys. The keys
        depend on the branches that the check takes. They are therefore recorded in the same evaluation as the problems.
        """
        # Results that depend on no broken key stay valid, so nothing needs to be declared.
        read: set[str] = set()
        recorder: Any = _ReadRecorder(config, read)
        return self.check(recorder), frozenset(read)


def rule(check: Check) -> Rule:
    """Marks a check as a rule; each public function of a rule module with this decorator is one."""
    return Rule(check)


@dataclass(frozen=True, kw_only=True, slots=True)
class IgnoredKey:
    """Keys or whole groups that have no effect if a condition holds."""

    names: tuple[str, ...]
    when: Callable[[RunConfig], bool]
    why: str


class _ReadRecorder:
    """Proxy of a config group that records the path of each key that is read through it."""

    # Without a `__dict__`, `vars(group)` in a check raises instead of returning keys that are not recorded.
    __slots__ = ("_group", "_prefix", "_read")

    def __init__(self, group: ConfigGroup, read: set[str], prefix: str = "") -> None:
        self._group, self._read, self._prefix = group, read, prefix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._group, name)
        if isinstance(value, ConfigGroup):
            return _ReadRecorder(value, self._read, f"{self._prefix}{name}.")
        self._read.add(f"{self._prefix}{name}")
        return value
