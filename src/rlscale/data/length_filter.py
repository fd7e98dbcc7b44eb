"""Drops rows that are too long, and warns with their number and rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rlscale.errors import DataError
from rlscale.types import Prompt

NAMED_ROWS = 10
"""Maximum number of rows listed in a warning; of the others it gives the number."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Maximum number of tokens of a part of a row."""

    tokens: int
    name: str  # of the limit, in messages
    what: str = "prompts"  # limited part, in messages


def drop_too_long(prompts: Sequence[Prompt], lengths: Sequence[int], *, limit: Limit, path: str) -> list[Prompt]:
    """Returns the prompts within the limit; warns with the number and rows of the others.

    Args:
        prompts: in the order of the file.
        lengths: tokens of the limited part; one per prompt.
        limit: the maximum, and its name.
        path: of the file, for messages.

    Raises:
        DataError: all prompts are too long.
    """
    long = [prompt.index + 1 for prompt, length in zip(prompts, lengths, strict=True) if length > limit.tokens]
    if long and len(long) == len(prompts):
        reason = f"all {len(prompts)} are longer than {limit.name} ({limit.tokens})"
        raise DataError(f"{path} must have at least one usable prompt, got none; {reason}")
    if long:
        others = len(long) - NAMED_ROWS
        rows = ", ".join(map(str, long[:NAMED_ROWS])) + (f" and {others} more" if others > 0 else "")
        _logger.warning(
            "%d of %d %s of %s are longer than %s (%d tokens) and were dropped: rows %s",
            len(long),
            len(prompts),
            limit.what,
            path,
            limit.name,
            limit.tokens,
            rows,
        )
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit.tokens]
