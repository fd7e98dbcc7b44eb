"""One key in one configuration: what it is, what it has been set to, and by whom."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rlscale.config.errors import show, unknown_key
from rlscale.config.hydra.interpolation import is_interpolated
from rlscale.config.inspect.help import WIDTH, not_built
from rlscale.config.keys import Key, find_key, keys, nodes
from rlscale.config.load import LoadedConfig
from rlscale.config.passthrough import is_passthrough, passthrough_groups
from rlscale.config.passthrough.check import LIBRARIES
from rlscale.config.passthrough.field_types import in_words
from rlscale.errors import ConfigError, Problem

DEFAULT = "its default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What there is to say about a key; texts are empty where there is nothing."""

    key: str
    type: str
    constraint: str
    default: Any
    required: bool
    description: str
    value: Any
    set_by: str  # "command line", file and line, the reason it was derived, or DEFAULT
    replaced: Any = None  # the value that was given and did not stay
    replaced_from: str = ""
    warning: str = ""
    not_built: str = ""

    def lines(self) -> list[str]:
        """As text for a terminal."""
        default = "none, it must be set" if self.required else show(self.default)
        facts = [
            ("type", self.type),
            ("constraint", self.constraint),
            ("default", default),
            ("value", show(self.value)),
            ("set by", self.set_by),
            ("instead of", f"{show(self.replaced)} ({self.replaced_from})" if self.replaced_from else ""),
            ("warning", self.warning),
            ("", self.not_built),
        ]
        told = textwrap.wrap(self.description, WIDTH)
        return [self.key, *(f"  {name:<12}{text}".rstrip() for name, text in facts if text), "", *told]


def explain(path: str, loaded: LoadedConfig) -> Explanation:
    """What `path` is and has in a loaded configuration.

    Raises: ConfigError when there is no such key.
    """
    key = find_key(path)
    if key is None and is_passthrough(path):
        return _explain_passed(path, loaded)
    if key is None:
        is_group = path in nodes() or path in loaded.composed.folders.groups()
        fix = f"it is a group: rlscale-config help {path}" if is_group else unknown_key(path, "", origin="").fix
        raise ConfigError([Problem(path="explain", rule="be given a key", value=path, fix=fix)])
    value = attrgetter(key.path)(loaded.config)
    for name in path.removeprefix(key.path).split(".")[1:]:  # below a mapping
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
        not_built=not_built(key.path),
    )


def _explain_passed(path: str, loaded: LoadedConfig) -> Explanation:
    group, _, name = path.partition(".")
    own = getattr(loaded.config, group)
    library = LIBRARIES[group]
    arguments = library.known({key.name: getattr(own, key.name) for key in keys().values() if key.group == group})
    if name not in arguments.types:
        fix = f"rlscale-config help {group} lists its own keys; {library.listing}"
        raise ConfigError([Problem(path="explain", rule="be given a key", value=path, fix=fix)])
    kind, passed = library.kind.format(version=arguments.version), getattr(own, passthrough_groups()[group])
    told = f"This is {kind}, handed on as it is. Left out, the library's own default counts."
    if name in library.ours:
        told = f"This is {kind}, which rlscale sets; {library.ours[name]}."
    return Explanation(
        key=path,
        type=in_words(arguments.types[name]),
        constraint="",
        default=None,
        required=False,
        description=told,
        value=passed.get(name),
        set_by=_set_by(path, loaded) if name in passed else DEFAULT,
    )


def _set_by(path: str, loaded: LoadedConfig) -> str:
    """Who set a key, and as what where its value refers to others."""
    given: Any = loaded.composed.values
    for name in path.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
    written = f", as {given}" if is_interpolated(given) else ""
    return (loaded.composed.origin(path) or DEFAULT) + written


def _warning(key: Key, loaded: LoadedConfig) -> str:
    return next((warning for warning in loaded.warnings if warning.startswith(f"{key.path} ")), "")
