r"""The last \boxed{...} of a response, where most models write their answer."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlscale.types import ANSWER, Sample

_BRACE = re.compile(r"\\boxed\{|[{}]")


def last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...} with matching braces, or None."""
    # One pass: a response that repeats \boxed{ has thousands of boxes that no brace closes.
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
        elif opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, brace.start())
    return None if last is None else text[slice(*last)]


class BoxedReward:
    """Restricts a reward to the content of the last \\boxed{...} of the response; empty without a box."""

    def __init__(self, reward: Callable[[Sample], Any]) -> None:
        self.func = reward  # as of a partial object, so that a caller can find out whether it is async

    def __call__(self, sample: Sample) -> Any:
        boxed = last_boxed(sample.answer) or ""
        return self.func(replace(sample, response=boxed, metadata=sample.metadata | {ANSWER: boxed}))
