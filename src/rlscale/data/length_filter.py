"""Rows that are too long: left out, counted and named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rlscale.errors import DataError
from rlscale.types import Prompt

NAMED_ROWS = 10
"""So many are named in a warning; of the others their number."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Most tokens of something in a row."""

    tokens: int
    name: str  # of the limit, for messages
    what: str = "prompts"


def keep_short(prompts: Sequence[Prompt], lengths: Sequence[int], *, limit: Limit, path: str) -> list[Prompt]:
    """The prompts within the limit; a warning says how many are not, and which rows those are.

    Args:
        prompts: in the order of the file.
        lengths: of what is limited, in tokens; one for each prompt.
        limit: see there.
        path: of the file, for messages.

    Raises:
        DataError: all of them are longer.
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
