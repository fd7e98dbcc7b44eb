"""Calls of user functions between generation and training: outside of the event loop, with a deadline."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlscale.errors import HookError
from rlscale.plugins.daemon_call import call_in_daemon

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
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await call_in_daemon(self.function, *arguments)
        except TimeoutError:
            raise HookError(
                f"{self.key} must return within {self.timeout_key}={self.timeout_s:g}, got no end"
            ) from None
        except HookError:
            raise
        except Exception as error:  # user code may raise anything
            raise HookError(f"{self.key} failed{code_place(error)}: {type(error).__name__}: {error}") from error

    def error(self, rule: str, found: str) -> HookError:
        """The failure of a function that returned something wrong."""
        return HookError(f"{self.key} must {rule}, got {found}")


def code_place(error: BaseException) -> str:
    """File and line that raised, i.e. the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
