"""The loss of supervised training on held-out prompts with their labels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean

from rlscale.config import BatchConfig
from rlscale.data.batch import build_batch
from rlscale.data.microbatch_plan import plan_steps
from rlscale.types import Group, StepPlan, TrainBatch, WeightVersion

Measure = Callable[[TrainBatch, Sequence[StepPlan]], Awaitable[float]]
"""`Trainers.loss`."""

Turn = Callable[[WeightVersion], AbstractAsyncContextManager[None]]
"""The trainer has its GPUs to itself inside; the engines are at that version before and after."""


def _no_turn(version: WeightVersion) -> AbstractAsyncContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSet:
    """Held-out samples that are labels, cut for the trainer's ranks."""

    batch: TrainBatch
    steps: tuple[StepPlan, ...]

    @classmethod
    def of(cls, groups: Sequence[Group], config: BatchConfig, *, num_ranks: int, context_ranks: int) -> LabelledSet:
        batch = build_batch(groups, version=0, has_rewards=False)
        return cls(
            batch=batch, steps=tuple(plan_steps(batch, config, num_ranks=num_ranks, context_ranks=context_ranks))
        )


class HeldOutLoss:
    """Measures what the trainer's weights give at the moment.

    Args:
        sets: by name.
        measure: what computes the loss.
        turn: taken once for all sets, where engines have the trainer's GPUs at an evaluation.

    Example:
        held_out = HeldOutLoss({"gsm8k": labelled}, measure=trainers.loss)
        metrics = await held_out.run(version)  # {"eval/gsm8k/loss": 1.7, "eval/loss": 1.7}
    """

    def __init__(self, sets: Mapping[str, LabelledSet], *, measure: Measure, turn: Turn = _no_turn) -> None:
        self._sets, self._measure, self._turn = dict(sets), measure, turn

    async def run(self, version: WeightVersion) -> dict[str, float]:
        """`eval/<set>/loss` by token for every set, and `eval/loss`, the mean over the sets; nothing without sets."""
        if not self._sets:
            return {}
        async with self._turn(version):
            losses = {name: await self._measure(each.batch, each.steps) for name, each in self._sets.items()}
        return {f"eval/{name}/loss": loss for name, loss in losses.items()} | {"eval/loss": fmean(losses.values())}
