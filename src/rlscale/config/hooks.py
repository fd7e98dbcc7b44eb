"""Functions of the user that a key names by dotted path: imported, and checked against how they will be called.

The first moment that user code runs, so it comes after everything else is found to be right.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rlscale.config.custom import PARAMETER
from rlscale.errors import ConfigError, Problem


def import_named(path: str, *, key: str) -> Any:
    """What `package.module:name` or `package.module.name` means. Modules in the working directory are found too.

    Raises:
        ConfigError: it cannot be imported, or is not there; names `key`.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides no installed module
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code raises what it likes; goes on as ConfigError
        fix = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise _error(key, "name something that can be imported", path, fix) from error
    if not hasattr(module, name):
        fix = f"{module.__file__ or module_name} has no {name!r}"
        raise _error(key, "name something that can be imported", path, fix)
    return getattr(module, name)


def load_function(path: str, *, key: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """The function that `path` names.

    Args:
        path: `package.module:name`.
        key: of the configuration, for messages.
        arguments: what it will be called with, by position.

    Raises:
        ConfigError: it cannot be imported, or cannot be called so.
    """
    function = import_named(path, key=key)
    if inspect.isclass(function):
        raise _error(key, "name a function or an object", path, "it is a class; make an instance in the module")
    if not callable(function):
        raise _error(key, "name something that can be called", path, f"it is {type(function).__name__}")
    signature = inspect.signature(function)
    if not accepts(signature, *arguments):
        rule = f"be callable with ({', '.join(arguments)})"
        raise _error(key, rule, path, f"its parameters are {signature}")
    return function  # type: ignore[no-any-return]


def accepts(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Whether a function with this signature can be called so; its parameter `custom` is filled in by rlscale."""
    named = [parameter for name, parameter in signature.parameters.items() if name != PARAMETER]
    try:
        signature.replace(parameters=named).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _error(key: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=key, rule=rule, value=value, fix=fix)])
