"""Turns what is wrong into problems with a path, a rule, a value and a fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from rlscale.config.schema import Key
from rlscale.config.suggest import nearest, nearest_key
from rlscale.errors import Problem

COMMAND_LINE = "command line"


def show(value: Any) -> str:
    """A value as it is written in YAML."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def unknown_key(path: str, value: Any, *, origin: str) -> Problem:
    """`path` is no key of the configuration."""
    found = nearest_key(path)
    fix = f"did you mean {found}?" if found else "rlscale-train --help lists the groups"
    return Problem(path=path, rule="be a known key", value=show(value), fix=fix, origin=origin)


def wrong_type(key: Key, value: Any, *, origin: str) -> Problem:
    """`value` cannot become the key's type."""
    found = nearest(str(value), key.choices) if key.choices else None
    fix = f"did you mean {found}?" if found else ""
    return Problem(path=key.path, rule=f"be {key.type_text}", value=show(value), fix=fix, origin=origin)


def unset_key(key: Key) -> Problem:
    """A key without default was set nowhere."""
    return Problem(path=key.path, rule="be set", value="nothing", fix=f"add {key.path}=<value>; {key.description}")


def from_pydantic(error: ErrorDetails, *, origin: str) -> Problem:
    """One entry of `ValidationError.errors()`."""
    path = ".".join(str(part) for part in error["loc"])
    return Problem(path=path, rule=_rule(error), value=show(error["input"]), origin=origin)


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
        case "string_pattern_mismatch":
            return f"match the pattern {context['pattern']}"
        case "finite_number":
            return "be a finite number"
        case _:
            return f"be valid ({error['msg']})"
