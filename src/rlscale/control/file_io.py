"""Writing files in a thread beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def write_in_thread(write: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a cancellation waits until the thread is done.

    A thread cannot be stopped, and the attempt that follows writes into the same folders.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write, *args, **options))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise
