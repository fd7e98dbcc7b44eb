"""Parts that a rehearsal puts in place of those of a run."""

from collections.abc import Callable
from dataclasses import dataclass

from rlscale.engines.launch import EngineLaunch
from rlscale.protocols import Reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Substitutes:
    """Replacements for an engine's launch and for the reward of training samples and evaluation."""

    launch: Callable[[EngineLaunch], EngineLaunch]
    reward: Callable[[Reward], Reward]  # of a module, so that a process of rewards can import it
