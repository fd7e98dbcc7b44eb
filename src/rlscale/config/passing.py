"""Keys that a group hands on to a library: `sglang.<argument>`. The library knows their names and types.

They are told from mistakes only after composition, when it is known which interpreter has the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlscale.config.problems import show
from rlscale.config.schema import keys
from rlscale.config.sglang_arguments import OURS, ServerArguments, fits, in_words, known_arguments
from rlscale.config.suggest import nearest
from rlscale.errors import Problem


@dataclass(kw_only=True, slots=True)
class Passed:
    """Values that are right, by group and name, and what was wrong with the others."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def paths(self) -> set[str]:
        return {f"{group}.{name}" for group, named in self.values.items() for name in named}


@cache
def passing_groups() -> Mapping[str, str]:
    """The field that holds what is handed on, by group."""
    owners = {key.group: key.owner for key in keys().values() if key.path.count(".") == 1}
    return {group: owner.passed_on for group, owner in owners.items() if owner.passed_on}


def is_passed(path: str) -> bool:
    """Whether `path` is a key that its group hands on, if the library knows it."""
    group, _, name = path.partition(".")
    return group in passing_groups() and bool(name) and path not in keys()


def check_passed(given: Mapping[str, Any], values: Mapping[str, Any], origin: Callable[[str], str]) -> Passed:
    """Checks names and types.

    Args:
        given: values of the keys that `is_passed`, by path.
        values: the whole composed config, nested and unchecked.
        origin: where the value of a path was set.
    """
    passed = Passed()
    if not given:
        return passed
    python = values.get("sglang", {}).get("python")
    arguments = known_arguments(python if isinstance(python, str) and python else None)
    for path, value in given.items():
        group, _, name = path.partition(".")
        wrong = _what_is_wrong(path, value, arguments)
        if wrong is None:
            passed.values.setdefault(group, {})[name] = value
        else:
            rule, fix = wrong
            passed.problems.append(Problem(path=path, rule=rule, value=show(value), fix=fix, origin=origin(path)))
    return passed


def _what_is_wrong(path: str, value: Any, arguments: ServerArguments) -> tuple[str, str] | None:
    """Rule and fix; None when the value can be handed on."""
    group, _, name = path.partition(".")
    types = arguments.types
    if name in OURS:
        return "be left to rlscale", OURS[name]
    if name not in types:
        own = [key.name for key in keys().values() if key.group == group]
        found = nearest(name, [*own, *(known for known in types if known not in OURS)])
        fix = f"did you mean {group}.{found}?" if found else "`python -m sglang.launch_server --help` lists them"
        return f"be a key of this group or an argument of SGLang {arguments.version}'s server", fix
    if isinstance(value, str) and "${" in value:
        return None  # known only when it is resolved
    if not fits(value, types[name]):
        return f"be {in_words(types[name])}", ""
    return None
