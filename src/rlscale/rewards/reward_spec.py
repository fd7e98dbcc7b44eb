"""Description of a reward that a process can load: keys and dotted paths instead of objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlscale.config import RewardConfig
from rlscale.plugins.args_view import Args
from rlscale.protocols import Reward
from rlscale.rewards.judge_client import JudgeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """A reward as its process loads it.

    State and closures stay in the module of a dotted path: a process imports it itself and shares nothing with the run.
    """

    config: RewardConfig
    name: str | None = None  # of an entry of `reward.functions`; None: the only reward of the run
    custom: dict[str, Any] = field(default_factory=dict)  # the config's node of that name
    args: Args | None = None  # for a reward in slime's form
    wrapper: str | None = None  # `package.module:name` of a function from reward to reward; None: none
    judge: JudgeSpec | None = field(default=None, repr=False)  # None: the run has no engines of a judge
    max_cpu_s: float | None = None  # processor time of one call, for our graders; None: no limit
    slow_value: float = 0.0  # reward of a sample whose call exceeds it


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunctions:
    """The rewards of `reward.functions` by name: all of them score each sample."""

    functions: Mapping[str, Reward | RewardSpec]


RunReward: TypeAlias = Reward | RewardSpec | RewardFunctions
"""The reward of a run: a function that is pure and fast, what a process needs to load it, or several by name."""
