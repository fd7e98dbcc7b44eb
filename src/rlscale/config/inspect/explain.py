"""Explains one key of a configuration: its type, its value, and the origin of the value."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rlscale.config.hydra.interpolation import is_interpolated
from rlscale.config.inspect.help import WIDTH
from rlscale.config.keys import Key, find_key, keys, nodes
from rlscale.config.library_limits import LIMITS
from rlscale.config.load import LoadedConfig
from rlscale.config.passthrough import is_passthrough, passthrough_groups
from rlscale.config.passthrough.check import LIBRARIES
from rlscale.config.passthrough.field_types import type_in_words
from rlscale.config.problems import show
from rlscale.config.rules.library_args import REFUSED
from rlscale.config.unknown_keys import unknown_key
from rlscale.errors import ConfigError, Problem

DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Facts about a key; a text that does not apply is empty."""

    key: str
    type: str
    constraint: str
    default: Any
    required: bool
    description: str
    value: Any
    set_by: str  # "command line", file and line, the reason it was derived, or DEFAULT
    replaced: Any = None  # the given value that was replaced
    replaced_from: str = ""
    warning: str = ""

    def lines(self) -> list[str]:
        """As text for a terminal."""
        default = "none, it must be set" if self.required else show(self.default)
        facts = [
            ("type", self.type),
            ("constraint", self.constraint),
            ("default", default),
            ("value", show(self.value)),
            ("set by", self.set_by),
            ("replaces", f"{show(self.replaced)} ({self.replaced_from})" if self.replaced_from else ""),
            ("warning", self.warning),
        ]
        description = textwrap.wrap(self.description, WIDTH)
        return [self.key, *(f"  {name:<12}{text}".rstrip() for name, text in facts if text), "", *description]


def explain(path: str, loaded: LoadedConfig) -> Explanation:
    """Explains the key `path` of a loaded configuration.

    Raises: ConfigError when there is no such key.
    """
    key = find_key(path)
    if key is None and is_passthrough(path):
        return _explain_passthrough(path, loaded)
    if key is None:
        is_group = path in nodes() or path in loaded.composed.folders.groups()
        fix = f"it is a group: rlscale-config help {path}" if is_group else unknown_key(path, "", origin="").fix
        raise ConfigError([Problem(path="explain", rule="be called with a known key", value=path, fix=fix)])
    value = attrgetter(key.path)(loaded.config)
    # The remaining names are entries of a mapping.
    for name in path.removeprefix(key.path).split(".")[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    derived = next((each for each in loaded.derived if each.key == key.path), None)
    origin = _set_by(path, loaded)
    replaced = derived is not None and derived.was is not None
    return Explanation(
        key=path,
        type=key.type_text,
        constraint=key.constraint_text,
        default=key.default,
        required=key.required,
        description=key.description,
        value=value,
        set_by=f"derived: {derived.why}" if derived is not None else origin,
        replaced=derived.was if derived is not None and replaced else None,
        replaced_from=origin if replaced else "",
        warning=_warning(key, loaded),
    )


def _explain_passthrough(path: str, loaded: LoadedConfig) -> Explanation:
    group, _, name = path.partition(".")
    own = getattr(loaded.config, group)
    library = LIBRARIES[group]
    arguments = library.load({key.name: getattr(own, key.name) for key in keys().values() if key.group == group})
    if name not in arguments.types:
        fix = f"rlscale-config help {group} lists its own keys; {library.listing}"
        raise ConfigError([Problem(path="explain", rule="be called with a known key", value=path, fix=fix)])
    kind, passed = library.kind.format(version=arguments.version), getattr(own, passthrough_groups()[group])
    description = f"This is {kind}, passed through unchanged. When it is not set, the library's default applies."
    if name in library.reserved:
        description = f"This is {kind}, which rlscale sets; {library.reserved[name]}."
    elif refused := REFUSED[group].get(name):
        description = f"This is {kind}. Only {show(refused[0])} is allowed: {refused[1]}."
    elif limit := LIMITS.get(path):
        description = f"This is {kind}. Only {show(limit.value)} is allowed: {limit.reason}."
    derived = next((f"derived: {each.why}" for each in loaded.derived if each.key == path), None)
    return Explanation(
        key=path,
        type=type_in_words(arguments.types[name]),
        constraint="",
        default=None,
        required=False,
        description=description,
        value=passed.get(name),
        set_by=derived or (_set_by(path, loaded) if name in passed else DEFAULT),
    )


def _set_by(path: str, loaded: LoadedConfig) -> str:
    """The origin of a key's value, and the text of an interpolation."""
    # The composed values still contain the text of interpolations.
    given: Any = loaded.composed.values
    for name in path.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
    written = f", as {given}" if is_interpolated(given) else ""
    return (loaded.composed.origin(path) or DEFAULT) + written


def _warning(key: Key, loaded: LoadedConfig) -> str:
    return next((warning for warning in loaded.warnings if warning.startswith(f"{key.path} ")), "")
