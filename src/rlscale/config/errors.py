"""Turns what is wrong into problems with a path, a rule, a value and a fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic_core import ErrorDetails

from rlscale.config.groups.patterns import DOTTED_PATH
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.keys import Key, keys, nodes
from rlscale.config.suggest import nearest, nearest_key
from rlscale.errors import Problem

COMMAND_LINE = "command line"
DEFAULT = "default"
DERIVED = "derived"
EVERYTHING = ""
"""Stands among the names of broken keys and groups for all of them."""


def show(value: Any) -> str:
    """A value as it is written in YAML."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def unknown_key(path: str, value: Any, *, origin: str) -> Problem:
    """`path` is no key of the configuration."""
    if path in ConfigFolders.find().groups() and path not in nodes():
        fix = (
            f"on a command line write {path}={show(value)}, in a file the entry `{show(value)}` of the list `defaults`"
        )
        return Problem(path=path, rule="be chosen, not set", value=show(value), fix=fix, origin=origin)
    if isinstance(value, Mapping) and (group := nearest(path, nodes())):
        fix = f"did you mean {group}?"
        return Problem(path=path, rule="be a known group", value=show(value), fix=fix, origin=origin)
    found = nearest_key(path)
    fix = f"did you mean {found}?" if found else "rlscale-train --help lists the groups"
    return Problem(path=path, rule="be a known key", value=show(value), fix=fix, origin=origin)


def wrong_type(key: Key, value: Any, *, origin: str) -> Problem:
    """`value` cannot become the key's type."""
    rule, fix = f"be {key.type_text}", _fix_of_type(key, value)
    return Problem(path=key.path, rule=rule, value=show(value), fix=fix, origin=origin)


def not_a_group(path: str, value: Any, *, origin: str) -> Problem:
    """A value stands where a group with keys of its own does."""
    own = next(key.path for key in keys().values() if key.path.startswith(f"{path}."))
    fix = f"set one of its keys, e.g. {own}=<value>"
    if isinstance(value, str) and value in ConfigFolders.find().groups().get(path, ()):
        fix = f"write `- override /{path}: {value}` in the list `defaults`"
    return Problem(path=path, rule="be set key by key", value=show(value), fix=fix, origin=origin)


def _fix_of_type(key: Key, value: Any) -> str:
    """What to write instead."""
    found = nearest(str(value), key.choices)
    if found:
        return f"did you mean {found}?"
    if value == "" and key.optional:
        return f"write {key.path}=null for none"
    if key.is_mapping:
        return f"write {key.path}.<name>=<value>"
    if key.type is int and isinstance(value, float) and value.is_integer():
        return f"write {key.path}={int(value)}"
    is_entry = isinstance(value, str) == (get_args(key.type) == (str,)) and value != ""
    if get_origin(key.type) is list and isinstance(value, str | int | float) and is_entry:
        return f"write {key.path}=[{value}]"
    return leave_out(key)


def leave_out(key: Key) -> str:
    """The fix where the rule says all there is to say of the value."""
    return f"write {key.path}=<value>" if key.required else f"leave it out for its default, {show(key.default)}"


def unset_key(key: Key) -> Problem:
    """A key without default was set nowhere."""
    return Problem(path=key.path, rule="be set", value="nothing", fix=f"add {key.path}=<value>; {key.description}")


def from_pydantic(error: ErrorDetails, *, key: Key, origin: str) -> Problem:
    """One entry of `ValidationError.errors()`, about `key` or what is inside its value."""
    path, value = ".".join(str(part) for part in error["loc"]), show(error["input"])
    fix = leave_out(key)
    if error["type"] == "string_pattern_mismatch" and error.get("ctx", {}).get("pattern") == DOTTED_PATH:
        fix = f"write e.g. {key.path}=my_module:my_function"
    return Problem(path=path, rule=_rule(error), value=value, fix=fix, origin=origin)


def _rule(error: ErrorDetails) -> str:
    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            return f"be > {context['gt']:g}"
        case "greater_than_equal":
            return f"be >= {context['ge']:g}"
        case "less_than":
            return f"be < {context['lt']:g}"
        case "less_than_equal":
            return f"be <= {context['le']:g}"
        case "string_too_short":
            return "not be empty"
        case "too_short":
            return f"have at least {context['min_length']} entry"
        case "string_pattern_mismatch" if context["pattern"] == DOTTED_PATH:
            return "be written as package.module:name"
        case "string_pattern_mismatch":
            return f"match the pattern {context['pattern']}"
        case "finite_number":
            return "be a finite number"
        case _:
            return f"be valid ({error['msg']})"
