"""Completes the advice of problems: the value that applies without an override, and YAML for problems of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlscale.config.hydra.compose import Composed
from rlscale.config.hydra.config_folders import short_path
from rlscale.config.keys import Key, find_key, keys, nodes
from rlscale.config.passthrough import is_passthrough
from rlscale.config.problems import default_fix, show
from rlscale.config.resolve.draft import Derived
from rlscale.errors import Problem

_OVERRIDE = re.compile(
    r"(?P<quote>'?)(?P<path>[a-z_]+(?:\.[A-Za-z0-9_<>]+)*)="
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\]|\{[^}]*\}|\$\{[^}]*\}|[^\s;,?')]+)(?P=quote)"
)
"""An override inside a text, in quotes where a shell needs them."""

_REMOVAL = re.compile(r"\bremove it\b(?! to )")
_NAMED_VALUE = re.compile(r"be (true|false|null|\d[\d.]*|alltoall)\b")


@dataclass(kw_only=True)
class Advisor:
    """Completes advice. Composes the files once more, only when a problem needs a value of theirs.

    Example:
        Advisor(composed=composed, derived=derived).complete(problem)
    """

    composed: Composed
    derived: Sequence[Derived] = ()  # with the defaults of the keys that have a problem

    def complete(self, problem: Problem) -> Problem:
        """The problem with the real default and, if its origin is a file, with YAML."""
        key = find_key(problem.path)
        fix = problem.fix
        if self._is_in_own_file(problem.origin):
            fix = as_yaml(fix, self.composed.folders.groups())
        if key is not None and not key.required and default_fix(key) in fix:
            fix = fix.replace(default_fix(key), self._default_text(key, problem.origin))
        elif self._is_packaged(problem.origin) and (neutral := _neutral_override(problem, key)):
            # The user cannot remove a line of rlscale's own files.
            fix = _REMOVAL.sub(lambda _: f"set {neutral}", fix)
        return replace(problem, fix=fix)

    def _default_text(self, key: Key, origin: str) -> str:
        """The value of a key without its override or, for a value of a file, without its line."""
        own = origin.partition(";")[0]
        values = self.composed.file_values(key.path)
        found = [(value, file) for value, file, line in values if own != f"{short_path(file)}:{line}"]
        if found:
            value, file = found[-1]
            return f"remove it to use {show(value)}, from {file.parent.name}={file.stem}"
        # The derived name of the run is that of a config with this problem.
        derived = next((each for each in self.derived if each.key == key.path and key.group != "run"), None)
        if derived is not None and derived.was is None:
            return f"remove it to use {show(derived.value)}: {derived.why}"
        return default_fix(key)

    def _is_in_own_file(self, origin: str) -> bool:
        """Whether a value comes from a file that the user can change; others need an override."""
        return ".yaml:" in origin.partition(";")[0] and not self._is_packaged(origin)

    def _is_packaged(self, origin: str) -> bool:
        """Whether a value comes from a file of rlscale."""
        return origin.startswith(f"{short_path(self.composed.folders.main)}{os.sep}")


def _neutral_override(problem: Problem, key: Key | None) -> str:
    """The override that has the effect of removing a value: the default, or the value that the rule names."""
    if key is not None:
        return f"{key.path}={show(key.default)}" if key.path == problem.path and not key.required else ""
    # The defaults of libraries are not known, but a rule about their arguments begins with the value that it allows.
    named = _NAMED_VALUE.match(problem.rule) if is_passthrough(problem.path) else None
    return f"{problem.path}={named[1]}" if named else ""


def as_yaml(fix: str, groups: Mapping[str, Any]) -> str:
    """Advice for a command line as advice for a file: `optim.lr=1` becomes `lr: 1` below `optim:`."""

    def rewrite(found: re.Match[str]) -> str:
        path, value = found["path"], found["value"]
        if fix[found.end() :].startswith(" on a command line"):
            return found[0]
        if path in groups:
            return f"`- override /{path}: {value}` in `defaults`"
        *parents, name = path.split(".")
        if find_key(path) is None and path.partition(".")[0] not in nodes() and path not in keys():
            return found[0]
        below = "".join(f" below `{parent}:`" for parent in reversed(parents))
        return f"`{name}: {value}`{below}"

    return _OVERRIDE.sub(rewrite, fix)
