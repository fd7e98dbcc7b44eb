r"""The last \boxed{...} of a response, where most models write their answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlscale.types import ANSWER, Sample


def last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...} with matching braces, or None."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        # Scans to the brace that closes this box; nested braces raise the depth.
        first = start + len(r"\boxed{")
        depth = 1
        for i in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[first:i]
        start = text.rfind(r"\boxed{", 0, start)
    return None


class BoxedReward:
    """Restricts a reward to the content of the last \\boxed{...} of the response; empty without a box."""

    def __init__(self, reward: Callable[[Sample], Any]) -> None:
        self.func = reward  # as of a partial object, so that a caller can find out whether it is async

    def __call__(self, sample: Sample) -> Any:
        boxed = last_boxed(sample.answer) or ""
        return self.func(replace(sample, response=boxed, metadata=sample.metadata | {ANSWER: boxed}))
