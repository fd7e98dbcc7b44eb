"""Checks the keys that a group passes to a library, by the names and types that the library defines.

Runs after composition, because the config names the interpreter that has the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.distance import OSA

from rlscale.config.keys import keys
from rlscale.config.passthrough import megatron_args, sglang_args, sglang_renames
from rlscale.config.passthrough.field_types import fits, type_in_words
from rlscale.config.passthrough.layer_pattern import read_pattern
from rlscale.config.passthrough.recorded import LibraryArguments
from rlscale.config.problems import nearest, show
from rlscale.errors import Problem

MIN_COMMON_WORDS = 70
"""Minimum similarity of two names, in percent of common words, for a suggestion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A library and the keys that a group passes to it."""

    load: Callable[[Mapping[str, Any]], LibraryArguments]  # from the values of the group
    reserved: Mapping[str, str]  # keys that rlscale sets, with the advice for each
    abbreviations: Mapping[str, str]  # and earlier names
    removed: Mapping[str, str]  # earlier keys without a successor, with the advice for each
    kind: str  # description of its keys, with a placeholder for the version
    listing: str  # the place that lists them


@dataclass(kw_only=True, slots=True)
class PassthroughValues:
    """Valid values, by group and name, and the problems of the others."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def paths(self) -> set[str]:
        return {f"{group}.{name}" for group, named in self.values.items() for name in named}


def _sglang_arguments(values: Mapping[str, Any]) -> LibraryArguments:
    python = values.get("python")
    return sglang_args.load_arguments(python if isinstance(python, str) and python else None)


def _megatron_arguments(values: Mapping[str, Any]) -> LibraryArguments:
    return megatron_args.load_arguments()


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "sglang": Library(
            load=_sglang_arguments,
            reserved=sglang_args.RESERVED,
            abbreviations=sglang_renames.RENAMED,
            removed=sglang_renames.REMOVED,
            kind="an argument of SGLang {version}'s server",
            listing="`python -m sglang.launch_server --help` lists them",
        ),
        "megatron": Library(
            load=_megatron_arguments,
            reserved=megatron_args.RESERVED,
            abbreviations=megatron_args.ABBREVIATIONS,
            removed={},
            kind="a field of Megatron-core {version}'s TransformerConfig or OptimizerConfig",
            listing="the docstrings of these classes list them",
        ),
    }
)


@cache
def passthrough_groups() -> Mapping[str, str]:
    """The field that contains the values for the library, by group."""
    owners = {key.group: key.owner for key in keys().values() if key.path.count(".") == 1}
    return {group: owner.passthrough_field for group, owner in owners.items() if owner.passthrough_field}


def is_passthrough(path: str) -> bool:
    """Whether `path` would be a key of a library: it is in such a group and not a key of rlscale."""
    group, _, name = path.partition(".")
    return group in passthrough_groups() and bool(name) and path not in keys()


def check_passthrough(
    given: Mapping[str, Any], values: Mapping[str, Any], origin: Callable[[str], str]
) -> PassthroughValues:
    """Checks names and types against the library.

    Args:
        given: values of the keys for which `is_passthrough` is true, by path.
        values: the whole composed config, nested and unchecked.
        origin: the origin of the value of a path.
    """
    passed = PassthroughValues()
    arguments: dict[str, LibraryArguments] = {}
    for path, text in given.items():
        value = read_pattern(path, text)
        group, _, name = path.partition(".")
        if group not in arguments:
            own = values.get(group, {})
            arguments[group] = LIBRARIES[group].load(own if isinstance(own, Mapping) else {})
        wrong = _rule_and_fix(path, value, arguments[group])
        if wrong is None:
            passed.values.setdefault(group, {})[name] = value
        else:
            rule, fix = wrong
            passed.problems.append(Problem(path=path, rule=rule, value=show(value), fix=fix, origin=origin(path)))
    return passed


def check_resolved(
    given: Mapping[str, Mapping[str, Any]], resolved: Mapping[str, dict[str, Any]], origin: Callable[[str], str]
) -> list[Problem]:
    """Checks the values of interpolations, which `check_passthrough` could not know.

    Args:
        given: values before they were resolved, by group and name.
        resolved: the same afterwards. Texts that stand for another type, as those of the environment do, are converted
            in place; wrong values are removed.
        origin: the origin of the value of a path.
    """
    problems = []
    for group, named in given.items():
        found = resolved[group]
        for name in [name for name, value in named.items() if "${" in str(value) and name in found]:
            path, arguments = f"{group}.{name}", LIBRARIES[group].load(found)
            wrong = _rule_and_fix(path, found[name], arguments)
            if wrong is not None and isinstance(found[name], str):
                decoded = read_pattern(path, _decode(found[name]))
                if _rule_and_fix(path, decoded, arguments) is None:
                    found[name], wrong = decoded, None
            if wrong is not None:
                rule, fix = wrong
                value = show(found.pop(name))
                problems.append(Problem(path=path, rule=rule, value=value, fix=fix, origin=origin(path)))
    return problems


def _decode(text: str) -> Any:
    """The number, boolean, list or null that a text stands for, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def nearest_argument(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate one edit away, or with all words of the name (`mem_fraction`), or else the most similar one."""
    candidates = list(candidates)
    # Compare by words first: names of arguments are often shortened or reordered rather than misspelt.
    words = name.replace("_", " ")
    shares = {each: fuzz.token_set_ratio(words, each.replace("_", " ")) for each in candidates}
    alike = min(candidates, key=lambda each: (-shares[each], OSA.distance(name, each)))
    spelt = nearest(name, candidates)
    if spelt and (OSA.distance(name, spelt) == 1 or shares[alike] < 100):
        return spelt
    return alike if shares[alike] >= MIN_COMMON_WORDS else None


def _rule_and_fix(path: str, value: Any, arguments: LibraryArguments) -> tuple[str, str] | None:
    """Rule and fix; None when the value is valid."""
    group, _, name = path.partition(".")
    library, types = LIBRARIES[group], arguments.types
    if name in library.reserved:
        return "not be set, because rlscale sets it", library.reserved[name]
    if group == "megatron" and name in megatron_args.OF_MODEL:
        return "not be set, because rlscale sets it", megatron_args.FROM_MODEL
    if name not in types:
        own = [key.name for key in keys().values() if key.group == group]
        # Abbreviations first: `tp` is similar to many names.
        found = library.abbreviations.get(name) or library.abbreviations.get(name.removesuffix("_size"))
        found = found or nearest_argument(name, [*own, *types])
        fix = f"did you mean {group}.{found}?" if found else library.listing
        if found is not None and found in library.reserved:
            # The argument itself must not be set, so it is not suggested.
            fix = library.reserved[found]
        fix = library.removed.get(name, fix)
        return f"be a key of this group or {library.kind.format(version=arguments.version)}", fix
    if group == "megatron" and types[name] in ("any", "any|null"):
        return "not be set", "it is a Python object, which YAML cannot express"
    if isinstance(value, str) and "${" in value:
        return None  # the value is known after resolution only
    if not fits(value, types[name]):
        return f"be {type_in_words(types[name])}", "remove it to use the library's default"
    return None
