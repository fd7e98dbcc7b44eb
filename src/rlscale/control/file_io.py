"""File writes in a thread, next to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def write_in_thread(write: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but a cancellation waits for the end of the thread.

    A thread cannot be stopped, and the next attempt of the run writes into the same folders.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write, *args, **options))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise
