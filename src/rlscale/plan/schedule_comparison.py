"""Simulated times of the choices of a rollout loop, and the settings with which partial rollouts are fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlscale.plan.rollout_simulation import SimulatedLoop, SimulatedTime, simulate

WAVES = (2, 3, 4)
"""Groups in flight of a partial rollout that are tried, relative to the groups of a rollout."""

MAX_LOSS = 0.02
"""Share of the speed for which fewer weight versions and fewer groups in flight are preferred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialSettings:
    """Settings of partial rollouts, by the names of the config group `sampling`, and the time with them."""

    over_sampling_batch_size: int
    max_weight_versions: int | None
    time: SimulatedTime


def compare_schedules(loop: SimulatedLoop, prompts: Sequence[Sequence[int]]) -> dict[str, SimulatedTime]:
    """The time of each choice by its name; the first one is the plain loop.

    Partial rollouts over-sample: by `loop.wave`, or twice the size of a rollout if it is not larger.
    """
    wave = max(loop.wave or 0, 2 * loop.num_groups)
    plain = replace(loop, schedule="plain", is_partial=False, wave=None)
    choices = {
        "plain": plain,
        "longest_first": replace(plain, schedule="longest_first"),
        "tail_batching": replace(plain, schedule="tail_batching"),
        "over_sampling": replace(plain, wave=wave),
        "partial_rollout": replace(plain, is_partial=True, wave=wave),
    }
    return {name: simulate(choice, prompts) for name, choice in choices.items()}


def find_partial_settings(loop: SimulatedLoop, prompts: Sequence[Sequence[int]]) -> PartialSettings:
    """The fastest partial rollouts, with as few weight versions and groups in flight as they allow.

    More groups in flight keep slots busy where few requests of each group are left; more versions avoid that long
    responses start again.
    """
    versions = [None] if loop.max_versions is None else [loop.max_versions, 2 * loop.max_versions]
    found = [
        PartialSettings(
            over_sampling_batch_size=wave * loop.num_groups,
            max_weight_versions=limit,
            time=simulate(
                replace(loop, schedule="plain", is_partial=True, wave=wave * loop.num_groups, max_versions=limit),
                prompts,
            ),
        )
        for limit in versions
        for wave in WAVES
    ]
    least = min(each.time.steps_per_rollout for each in found)
    return next(each for each in found if each.time.steps_per_rollout <= least * (1 + MAX_LOSS))
