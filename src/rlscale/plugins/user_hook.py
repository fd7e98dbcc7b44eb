"""Calls of user functions between generation and training: outside of the event loop, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rlscale.errors import ConfigError, DataError, HookError
from rlscale.plugins.daemon_call import call_in_daemon
from rlscale.plugins.hook_watch import watch_hook

TIMEOUT_KEY = "sampling.hook_timeout_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class UserHook:
    """A user function of a key, called in a separate thread.

    Example:
        mask = UserHook(key="sampling.sample_filter_path", function=function, timeout_s=600.0)
        await mask(groups)
    """

    key: str
    function: Callable[..., Any]
    timeout_s: float
    timeout_key: str = TIMEOUT_KEY

    async def __call__(self, *arguments: Any) -> Any:
        """Returns the result of the function.

        Raises:
            HookError: it raised, ended the program, or exceeded the deadline.
            ConfigError, DataError: what it returned is wrong.
        """
        threads: list[int] = []

        def call(*given: Any) -> Any:
            threads.append(threading.get_ident())
            return self.function(*given)

        try:
            with watch_hook(self.key, timeout_s=self.timeout_s, threads=threads):
                async with asyncio.timeout(self.timeout_s):
                    return await call_in_daemon(call, *arguments)
        except TimeoutError:
            raise HookError(
                f"{self.key} must return within {self.timeout_key}={self.timeout_s:g}, got no result"
            ) from None
        except (HookError, ConfigError, DataError):
            raise  # by rlscale's part around the function; they name what is wrong
        except Exception as error:  # user code may raise anything
            raise HookError(f"{self.key} failed{code_place(error)}: {type(error).__name__}: {error}") from error

    def error(self, rule: str, found: str) -> HookError:
        """The failure of a function that returned something wrong."""
        return HookError(f"{self.key} must {rule}, got {found}")


def code_place(error: BaseException) -> str:
    """File and line that raised, i.e. the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def is_finite(value: Any) -> bool:
    """Whether a value of user code is a finite number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int outside the range of floats, e.g. 10**400
        return False


def shown(value: Any, *, max_len: int = 80) -> str:
    """A value of user code for a message."""
    try:
        text = repr(value)
    except Exception as error:  # it is user code, and fails for an int of more than 4,300 digits
        return f"a value of type {type(value).__name__} without a text ({type(error).__name__})"
    return text if len(text) <= max_len else f"{text[:max_len]}..."


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a call of a function or object returns a coroutine."""
    inner = function
    while hasattr(inner, "func"):  # partial objects
        inner = inner.func
    # An object with `async def __call__` is no coroutine function itself.
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def own_metrics(builtin: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a log function added to the built-in ones or changed."""
    return {name: value for name, value in after.items() if name not in builtin or value != builtin[name]}
