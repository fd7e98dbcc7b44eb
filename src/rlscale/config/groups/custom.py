"""Node `custom`: values that rlscale passes to user code and does not read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

PARAMETER = "custom"
"""Parameter of a user function or class that receives the values."""


def with_custom(function: Callable[..., Any], custom: Mapping[str, Any]) -> Callable[..., Any]:
    """Binds the parameter `custom` of a function, if it has one."""
    try:
        parameter = inspect.signature(function).parameters.get(PARAMETER)
    except (TypeError, ValueError):  # some C functions have no signature
        return function
    if parameter is None or parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return function
    return partial(function, **{PARAMETER: dict(custom)})
