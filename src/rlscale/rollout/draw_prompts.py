"""Draws prompts from a source that may be code of the user."""

from __future__ import annotations

from typing import Protocol

from rlscale.data.source import KEY, UserSource
from rlscale.plugins.user_hook import UserHook
from rlscale.protocols import PromptSource
from rlscale.types import Prompt


class NextPrompts(Protocol):
    """The part of a `RolloutSource` that advances its position."""

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]: ...


async def draw_prompts(
    source: NextPrompts, prompts: PromptSource, rollout_id: int, number: int | None, *, timeout_s: float
) -> list[tuple[int, Prompt]]:
    """`source.next_prompts(...)`; in a thread if `prompts` is a class of the user.

    Its methods may read files or wait for a server: the requests of the run continue, and Ctrl-C ends the run.

    Args:
        timeout_s: deadline of the class of a user.

    Raises:
        HookError: the class of a user failed, or exceeded the deadline.
    """
    if isinstance(prompts, UserSource):
        take = UserHook(key=KEY, function=source.next_prompts, timeout_s=timeout_s)
        drawn: list[tuple[int, Prompt]] = await take(rollout_id, number)
        return drawn
    return source.next_prompts(rollout_id, number)
