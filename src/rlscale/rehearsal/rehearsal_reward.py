"""The reward of a rehearsal: calls the reward of the run, and adds chance, so that advantages are not all zero."""

from __future__ import annotations

import inspect
import random
from collections.abc import Coroutine, Mapping
from numbers import Real
from typing import Any

from rlscale.protocols import Reward
from rlscale.types import Sample


class RehearsedReward:
    """Adds 0 or 1 at random to every reward. An untrained model earns none, and equal rewards give no gradient.

    An error of the wrapped reward ends the rehearsal as it ends the run.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def __call__(self, sample: Sample) -> Any:
        found: Any = self._reward(sample)
        return self._awaited(found, sample) if inspect.iscoroutine(found) else _with_chance(found, sample)

    async def _awaited(self, found: Coroutine[Any, Any, Any], sample: Sample) -> Any:
        return _with_chance(await found, sample)

    def close(self) -> None:
        """Releases the resources of the wrapped reward."""
        close = getattr(self._reward, "close", None)
        if close is not None:
            close()


def _with_chance(found: Any, sample: Sample) -> Any:
    chance = random.Random(sample.seed).getrandbits(1)
    if isinstance(found, Mapping):
        return {name: value + chance if isinstance(value, Real) else value for name, value in found.items()}
    # Anything else is reported by the caller.
    return found + chance if isinstance(found, Real) else found
