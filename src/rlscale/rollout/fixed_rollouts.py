"""Rollouts whose groups are given: all of them are trained, in their order."""

from collections.abc import Sequence

from rlscale.protocols import CollectSettings
from rlscale.rollout.draw_prompts import NextPrompts
from rlscale.types import Group, Prompt


class FixedRollouts:
    """The part of a `RolloutSource` that concerns filters and the buffer, which fixed rollouts do not have."""

    settings = CollectSettings()
    max_lag = 0

    async def draw(self: NextPrompts, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """See RolloutSource."""
        return self.next_prompts(rollout_id, number)

    def trajectory_ids(self, index: int) -> Sequence[int]:
        """One trajectory for each group."""
        return [index]

    def reason_to_drop(self, group: Group) -> str | None:
        """None: every group is kept."""
        return None

    async def choose_buffered(self, groups: Sequence[Group], number: int) -> list[int]:
        """None: there is no buffer."""
        return []

    def observe_dropped(self, group: Group, *, rollout_id: int) -> None:
        """Does nothing: no group is dropped."""

    def observe(self, groups: Sequence[Group], *, rollout_id: int) -> None:
        """Does nothing: the order is fixed."""

    async def stop(self, indices: Sequence[int]) -> None:
        """Does nothing: there are no requests."""
