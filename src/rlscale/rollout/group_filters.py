"""Filters of finished groups: the built-in ones, and the calls of those of users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any

from rlscale.errors import ConfigError, HookError, Problem
from rlscale.plugins.user_hook import UserHook, shown
from rlscale.types import REWARD_WEIGHTS, REWARDS, Group

DynamicFilter = Callable[[Group], "bool | str | Awaitable[bool | str]"]
BufferFilter = Callable[[Sequence[Group], int], "Sequence[Group] | Awaitable[Sequence[Group]]"]

TOO_FEW = "min_group_size"
"""Reason to drop a group of fewer than `sampling.min_group_size` trajectories; it never fills a rollout."""

EQUAL = 1e-8
"""Rewards of a group whose range is smaller are equal: rounding of a reward model is no signal."""


def reward_std(group: Group, *, by_name: bool = False) -> bool | str:
    """Keeps groups whose rewards differ: those of the others give no gradient (DAPO, arXiv:2503.14476, section 3.2).

    A group of one trajectory is kept. A trajectory counts once, however many samples it has. Rewards are those of the
    graders: as in DAPO, the penalty of `algo.overlong_buffer_len` keeps no group. verl: `algorithm.filter_groups` with
    `metric=acc`. slime: `check_reward_nonzero_std`.

    Args:
        by_name: keep a group also if only its weighted named rewards differ and their sums do not.
    """
    rewards = group.trajectory_rewards()
    columns = [rewards, *(_named_rewards(group) if by_name else [])]
    return len(rewards) < 2 or any(max(column) - min(column) > EQUAL for column in columns) or "equal_rewards"


def reward_std_with_fallback(group: Group, *, by_name: bool = False) -> bool | str:
    """As `reward_std`, but a rollout is filled with dropped groups rather than with further prompts.

    slime: `check_reward_nonzero_std_with_fallback`.
    """
    return reward_std(group, by_name=by_name)


def by_named_rewards(function: DynamicFilter) -> DynamicFilter:
    """The filter for an estimator that normalises each named reward (gdpo): equal sums may hide a gradient."""
    if function in (reward_std, reward_std_with_fallback):
        return partial(function, by_name=True)
    return function


def _named_rewards(group: Group) -> list[list[float]]:
    """The rewards of the trajectories by each name with a weight; empty if one of them has no named rewards."""
    found = {each.index: each.metadata for each in group.samples if each.reward is not None}.values()
    if not all(REWARD_WEIGHTS in metadata for metadata in found):
        return []
    names = {name for metadata in found for name, weight in metadata[REWARD_WEIGHTS].items() if weight}
    return [[metadata[REWARDS][name] for metadata in found] for name in sorted(names)]


reward_std_with_fallback.fills_rollouts = True  # type: ignore[attr-defined]


def accuracy_band(group: Group, *, custom: dict[str, Any] | None = None) -> bool | str:
    """Keeps groups whose mean reward is within `custom.accuracy_band=[low, high]`, both included.

    For rewards of 0 and 1 it is the share of correct answers: a curriculum of prompts that are neither solved nor out
    of reach.
    """
    low, high = accuracy_limits(custom or {})
    rewards = group.trajectory_rewards()
    mean = sum(rewards) / len(rewards)
    if mean < low:
        return "too_hard"
    return mean <= high or "too_easy"


def accuracy_limits(custom: dict[str, Any]) -> tuple[float, float]:
    """The two numbers of `custom.accuracy_band`. Raises ConfigError if they are none."""
    band: Any = custom.get("accuracy_band")
    is_pair = isinstance(band, Sequence) and len(band) == 2 and all(isinstance(each, int | float) for each in band)
    if not is_pair or band[0] > band[1]:
        rule, fix = "be two numbers, the lower one first", "set ++custom.accuracy_band=[0.1,0.9]"
        raise ConfigError([Problem(path="custom.accuracy_band", rule=rule, value=str(band), fix=fix)])
    return float(band[0]), float(band[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilters:
    """Functions that select groups. None: nothing is dropped; groups of the buffer come in the order of their index."""

    dynamic: DynamicFilter | None = None
    buffer: BufferFilter | None = None

    @property
    def fills_rollouts(self) -> bool:
        """Whether dropped groups fill a rollout that has too few, instead of further prompts."""
        return bool(getattr(_inner(self.dynamic), "fills_rollouts", False))

    def reason_to_drop(self, group: Group) -> str | Awaitable[str | None] | None:
        """The reason of the dynamic filter; None: the group is kept. To be awaited if the filter runs in a thread.

        Raises:
            HookError: the filter returned something else than a bool or a str.
        """
        if self.dynamic is None:
            return None
        verdict = self.dynamic(group)
        return self._judge_later(verdict) if isawaitable(verdict) else self._reason(verdict)

    async def _judge_later(self, verdict: Awaitable[bool | str]) -> str | None:
        return self._reason(await verdict)

    def _reason(self, verdict: object) -> str | None:
        if isinstance(verdict, str) and verdict:
            return verdict
        if verdict is True or verdict is False:
            return None if verdict else str(getattr(_inner(self.dynamic), "__name__", "filter"))
        raise HookError(f"sampling.dynamic_filter_path must return a bool or the reason to drop, got {shown(verdict)}")

    async def choose(self, groups: Sequence[Group], number: int) -> list[int]:
        """Indices of the groups of the buffer that come next, at most `number`. The filter may run in a thread.

        Raises:
            HookError: the buffer filter returned a group that is not in the buffer, or too many.
        """
        ordered = sorted(groups, key=lambda group: group.index)
        if self.buffer is None or not ordered:
            return [group.index for group in ordered[:number]]
        selected = self.buffer(ordered, number)
        found = await selected if isawaitable(selected) else selected
        if not isinstance(found, list | tuple) or not all(isinstance(group, Group) for group in found):
            raise HookError(f"sampling.buffer_filter_path must return groups of the buffer, got {shown(found)}")
        chosen = [group.index for group in found]
        known = {group.index for group in ordered}
        if len(chosen) > number or len(set(chosen)) < len(chosen) or not known.issuperset(chosen):
            raise HookError(
                f"sampling.buffer_filter_path must return at most {number} groups of the buffer, each once, got groups "
                f"{chosen[:20]}"
            )
        return chosen


def _inner(function: Any) -> Any:
    """The function of the user behind its wrappers."""
    if isinstance(function, UserHook):
        function = function.function
    # `functools.partial` binds the parameter `custom`.
    return function.func if isinstance(function, partial) else function
