"""Order in which a rollout draws and submits prompts: by expected length, and by difficulty.

    prompt source ── thinned by difficulty ──> [long ones are held back] ── longest first ──> groups
                            ▲                                                      │
                            └────── lengths and rewards of finished groups <───────┘

Groups that are trained on and those that a filter drops count alike: else a prompt that is always solved, whose groups
the filter drops, would never be known as easy. Their lengths and rewards count once their rollout is trained on, not
when a group finishes: so the order does not depend on the speed of engines, and a resumed run repeats it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlscale.config import SamplingConfig, ScheduleName
from rlscale.config.groups.sampling import TAIL_SHARE
from rlscale.images import build_images
from rlscale.protocols import PromptSource
from rlscale.types import ConversationPart, Group, Prompt

MAX_SKIPPED = 1000
"""Prompts in a row that are skipped by difficulty, after which one is taken anyway: a draw always ends."""


@dataclass(kw_only=True, slots=True)
class PromptStats:
    """Results of the groups of one prompt."""

    num_groups: int = 0
    length: float = 0.0  # mean response tokens of a trajectory in the last group
    accuracy: float = 0.0  # mean reward over all groups


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """Length and reward of one group."""

    index: int  # of the group
    row: int  # of its prompt in the source
    length: float  # mean response tokens of a trajectory
    accuracy: float  # mean reward

    @classmethod
    def from_group(cls, group: Group) -> GroupResult | None:
        """Result of the trajectories that did not fail; None: all failed, or have no reward."""
        lengths: dict[int, int] = {}
        for sample in group.samples:
            lengths[sample.index] = max(lengths.get(sample.index, 0), sample.response_len)
        rewards = group.trajectory_rewards()
        if not lengths or not rewards:
            return None
        return cls(
            index=group.index,
            row=group.prompt.index,
            length=sum(lengths.values()) / len(lengths),
            accuracy=sum(rewards) / len(rewards),
        )


class PromptSchedule:
    """Draws prompts for the rollouts of a run. See `sampling.schedule` and `sampling.difficulty_weights`.

    Invariant: the draws depend on the source, the seed and the groups passed to `observe` and `observe_dropped` alone.

    Example:
        schedule = PromptSchedule(source, config.sampling, seed=42)
        prompts = schedule.take(16)
        schedule.observe_dropped(group, rollout_id=0)   # by a filter
        schedule.observe(groups, rollout_id=0)          # once these are trained on
    """

    def __init__(self, source: PromptSource, config: SamplingConfig, *, seed: int) -> None:
        self._source, self._name, self._weights, self._seed = source, config.schedule, config.difficulty_weights, seed
        self._stats: dict[int, PromptStats] = {}  # by row of the source
        self._dropped: dict[int, list[GroupResult]] = {}  # of rollouts that were not trained on, by rollout
        self._held: list[Prompt] = []  # long ones, for a shared rollout
        self._early: list[Prompt] = []  # short ones that were drawn with them
        self._num_candidates = 0  # drawn from the source while prompts are skipped

    def take(self, num_prompts: int, *, starts_rollout: bool = True) -> list[Prompt]:
        """The next prompts, in the order in which they are submitted.

        Args:
            num_prompts: to return.
            starts_rollout: False: they replace prompts of a rollout that has begun.
        """
        if self._name == ScheduleName.tail_batching:
            prompts = self._take_batched(num_prompts, takes_long=starts_rollout)
        else:
            prompts = self._draw(num_prompts)
        if self._name == ScheduleName.plain:
            return prompts
        default = self._mean_length()
        # Stable: prompts of equal lengths keep their order.
        return sorted(prompts, key=lambda prompt: -self._length(prompt, default))

    def observe_dropped(self, group: Group, *, rollout_id: int) -> None:
        """Keeps the result of a group that a filter dropped until its rollout is observed."""
        if self._is_used and (result := GroupResult.from_group(group)) is not None:
            self._dropped.setdefault(rollout_id, []).append(result)

    def observe(self, groups: Sequence[Group], *, rollout_id: int) -> None:
        """Adds the results of the groups of a rollout that was trained on, and of those that were dropped in it."""
        if not self._is_used:
            return
        results = [result for group in groups if (result := GroupResult.from_group(group)) is not None]
        # The order in which groups finish is not that of a resumed run.
        for result in sorted([*results, *self._dropped.pop(rollout_id, [])], key=lambda each: each.index):
            stats = self._stats.setdefault(result.row, PromptStats())
            stats.num_groups += 1
            stats.length = result.length
            stats.accuracy += (result.accuracy - stats.accuracy) / stats.num_groups

    def state_dict(self) -> dict[str, Any]:
        """Results and drawn prompts, as JSON values, without the position of the source. Empty: it has none."""
        if not self._is_used:
            return {}
        return {
            "stats": {str(row): asdict(stats) for row, stats in self._stats.items()},
            "dropped": {str(rollout): [asdict(each) for each in found] for rollout, found in self._dropped.items()},
            "held": [asdict(prompt) for prompt in self._held],
            "early": [asdict(prompt) for prompt in self._early],
            "num_candidates": self._num_candidates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict` that is not empty."""
        self._stats = {int(row): PromptStats(**stats) for row, stats in state["stats"].items()}
        dropped = state.get("dropped", {})  # absent in older checkpoints
        self._dropped = {int(rollout): [GroupResult(**each) for each in found] for rollout, found in dropped.items()}
        self._held = [_to_prompt(fields) for fields in state["held"]]
        self._early = [_to_prompt(fields) for fields in state["early"]]
        self._num_candidates = state["num_candidates"]

    @property
    def _is_used(self) -> bool:
        return self._name != ScheduleName.plain or self._weights is not None

    def _take_batched(self, num_prompts: int, *, takes_long: bool) -> list[Prompt]:
        """Short prompts or, once they fill the draw, long ones alone."""
        limit, default = self._tail_length(), self._mean_length()
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            if takes_long and len(self._held) >= num_prompts:
                long, self._held = self._held[:num_prompts], self._held[num_prompts:]
                self._early = [*taken, *self._early]
                return long
            missing = num_prompts - len(taken)
            early, self._early = self._early[:missing], self._early[missing:]
            taken += early
            for prompt in self._draw(missing - len(early)):
                (self._held if self._length(prompt, default) > limit else taken).append(prompt)
        return taken

    def _draw(self, num_prompts: int) -> list[Prompt]:
        """Prompts of the source; by `difficulty_weights` some are skipped until the next epoch."""
        if self._weights is None:
            return self._source.take(num_prompts) if num_prompts else []
        taken: list[Prompt] = []
        num_skipped = 0
        while len(taken) < num_prompts:
            (prompt,) = self._source.take(1)
            self._num_candidates += 1
            # One number per candidate: nothing but the count has to be restored.
            number = random.Random(f"{self._seed}/{self._num_candidates}").random()
            if number < self._keep_share(prompt, self._weights) or num_skipped >= MAX_SKIPPED:
                taken.append(prompt)
                num_skipped = 0
            else:
                num_skipped += 1
        return taken

    def _keep_share(self, prompt: Prompt, weights: Sequence[float]) -> float:
        stats = self._stats.get(prompt.index)
        if stats is None:
            return 1.0
        bin_ = min(max(math.floor(stats.accuracy * len(weights)), 0), len(weights) - 1)
        return weights[bin_] / max(weights)

    def _length(self, prompt: Prompt, default: float) -> float:
        stats = self._stats.get(prompt.index)
        return default if stats is None else stats.length

    def _mean_length(self) -> float:
        lengths = [stats.length for stats in self._stats.values()]
        return sum(lengths) / len(lengths) if lengths else 0.0

    def _tail_length(self) -> float:
        """Expected length above which a prompt is held back; infinite while no length is known."""
        lengths = sorted(stats.length for stats in self._stats.values())
        return lengths[math.floor((1 - TAIL_SHARE) * (len(lengths) - 1))] if lengths else math.inf


def _to_prompt(fields: Mapping[str, Any]) -> Prompt:
    turns = tuple(ConversationPart(*turn) for turn in fields["turns"])
    messages = tuple(fields.get("messages", ()))
    images = build_images(fields.get("images", ()))
    tuples = {"token_ids": tuple(fields["token_ids"]), "turns": turns, "messages": messages, "images": images}
    return Prompt(**{**fields, **tuples})
