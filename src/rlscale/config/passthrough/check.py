"""Tells the keys that a library knows from mistakes.

Only after composition, when it is known which interpreter has the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.distance import OSA

from rlscale.config.errors import nearest, show
from rlscale.config.keys import keys
from rlscale.config.passthrough import megatron_args as of_megatron
from rlscale.config.passthrough import sglang_args as of_sglang
from rlscale.config.passthrough.field_types import fits, in_words
from rlscale.config.passthrough.recorded import Arguments
from rlscale.errors import Problem

SAME_WORDS = 70
"""From this share of common words on, in percent, a name is thought to be meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """Whose keys a group hands on."""

    known: Callable[[Mapping[str, Any]], Arguments]  # given the values of the group
    ours: Mapping[str, str]  # what rlscale sets, and what to do instead
    abbreviations: Mapping[str, str]
    kind: str  # what its keys are, given the version
    listing: str  # where all of them are listed


@dataclass(kw_only=True, slots=True)
class PassthroughValues:
    """Values that are right, by group and name, and what was wrong with the others."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def paths(self) -> set[str]:
        return {f"{group}.{name}" for group, named in self.values.items() for name in named}


def _sglang_arguments(values: Mapping[str, Any]) -> Arguments:
    python = values.get("python")
    return of_sglang.known_arguments(python if isinstance(python, str) and python else None)


def _megatron_arguments(values: Mapping[str, Any]) -> Arguments:
    return of_megatron.known_arguments()


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "sglang": Library(
            known=_sglang_arguments,
            ours=of_sglang.OURS,
            abbreviations={},
            kind="an argument of SGLang {version}'s server",
            listing="`python -m sglang.launch_server --help` lists them",
        ),
        "megatron": Library(
            known=_megatron_arguments,
            ours=of_megatron.OURS,
            abbreviations=of_megatron.ABBREVIATIONS,
            kind="a field of Megatron-core {version}'s TransformerConfig or OptimizerConfig",
            listing="the docstrings of these classes list them",
        ),
    }
)


@cache
def passthrough_groups() -> Mapping[str, str]:
    """The field that holds what is handed on, by group."""
    owners = {key.group: key.owner for key in keys().values() if key.path.count(".") == 1}
    return {group: owner.passthrough_field for group, owner in owners.items() if owner.passthrough_field}


def is_passthrough(path: str) -> bool:
    """Whether `path` is a key that its group hands on, if the library knows it."""
    group, _, name = path.partition(".")
    return group in passthrough_groups() and bool(name) and path not in keys()


def check_passthrough(
    given: Mapping[str, Any], values: Mapping[str, Any], origin: Callable[[str], str]
) -> PassthroughValues:
    """Checks names and types.

    Args:
        given: values of the keys that `is_passthrough`, by path.
        values: the whole composed config, nested and unchecked.
        origin: where the value of a path was set.
    """
    passed = PassthroughValues()
    arguments: dict[str, Arguments] = {}
    for path, value in given.items():
        group, _, name = path.partition(".")
        if group not in arguments:
            own = values.get(group, {})
            arguments[group] = LIBRARIES[group].known(own if isinstance(own, Mapping) else {})
        wrong = _what_is_wrong(path, value, arguments[group])
        if wrong is None:
            passed.values.setdefault(group, {})[name] = value
        else:
            rule, fix = wrong
            passed.problems.append(Problem(path=path, rule=rule, value=show(value), fix=fix, origin=origin(path)))
    return passed


def nearest_argument(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that is meant: one edit away, or with all of the words (`mem_fraction`), or else not too far."""
    candidates = list(candidates)
    words = name.replace("_", " ")
    shares = {each: fuzz.token_set_ratio(words, each.replace("_", " ")) for each in candidates}
    alike = min(candidates, key=lambda each: (-shares[each], OSA.distance(name, each)))
    spelt = nearest(name, candidates)
    if spelt and (OSA.distance(name, spelt) == 1 or shares[alike] < 100):
        return spelt
    return alike if shares[alike] >= SAME_WORDS else None


def _what_is_wrong(path: str, value: Any, arguments: Arguments) -> tuple[str, str] | None:
    """Rule and fix; None when the value can be handed on."""
    group, _, name = path.partition(".")
    library, types = LIBRARIES[group], arguments.types
    if name in library.ours:
        return "be left to rlscale", library.ours[name]
    if name not in types:
        own = [key.name for key in keys().values() if key.group == group]
        found = library.abbreviations.get(name.removesuffix("_size"))
        found = found or nearest_argument(name, [*own, *types])
        fix = f"did you mean {group}.{found}?" if found else library.listing
        if found is not None and found in library.ours:
            fix = f"did you mean {found}? {library.ours[found]}"
        return f"be a key of this group or {library.kind.format(version=arguments.version)}", fix
    if group == "megatron" and types[name] in ("any", "any|null"):
        return "be left out", "it is an object of Python, which no YAML can name"
    if isinstance(value, str) and "${" in value:
        return None  # known only when it is resolved
    if not fits(value, types[name]):
        return f"be {in_words(types[name])}", "leave it out for the library's default"
    return None
