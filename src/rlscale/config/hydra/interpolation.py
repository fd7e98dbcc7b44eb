"""Interpolations: values that refer to other keys, `${optim.lr}`, or to the environment, `${oc.env:HOME}`."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from rlscale.config.unknown_keys import nearest_key

RESOLVERS = ("oc.env", "oc.select", "oc.decode", "oc.create", "oc.deprecated", "oc.dict.keys", "oc.dict.values")


def is_interpolated(value: Any) -> bool:
    """Whether a value refers to others."""
    return isinstance(value, str) and "${" in value


def is_complete(value: str) -> bool:
    """Whether an interpolation can be parsed."""
    try:
        OmegaConf.create({"value": value})
    except GrammarParseError:
        return False
    return True


def explain_interpolation(error: OmegaConfBaseException, *, type_text: str = "valid") -> tuple[str, str]:
    """Rule and fix for an interpolation that refers to nothing, or to a value of another type.

    Args:
        error: of OmegaConf when it resolved the value.
        type_text: the type of the key.
    """
    # OmegaConf has one exception class for several causes; only the message distinguishes them.
    text = str(error).splitlines()[0]
    if missing := re.search(r"Interpolation key '([^']*)' not found", text):
        found = nearest_key(missing.group(1))
        return "refer to a key that exists", f"did you mean ${{{found}}}?" if found else "write its full path"
    if variable := re.search(r"Environment variable '([^']*)' not found", text):
        name = variable.group(1)
        return "refer to an environment variable that is set", f"set {name}, or write ${{oc.env:{name},<value>}}"
    if resolver := re.search(r"Unsupported interpolation type (\S+)", text):
        return f"use a known resolver, not {resolver.group(1)}", f"known resolvers: {', '.join(RESOLVERS)}"
    if "Missing mandatory value" in text:
        return f"be set, not {MISSING}", "write a value"
    if "ecursive" in text:
        return "not refer to itself", "write a value"
    return f"refer to a value that is {type_text}", "refer to another key, or write a value"
