"""Loss of supervised training on held-out prompts with labels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig
from rlscale.data.batch import build_batch
from rlscale.data.microbatch_plan import plan_steps
from rlscale.types import Group, StepPlan, TrainBatch, WeightVersion

ComputeLoss = Callable[[TrainBatch, Sequence[StepPlan]], Awaitable[float]]
"""`Trainers.eval_loss`."""

TrainerScope = Callable[[WeightVersion], AbstractAsyncContextManager[None]]
"""Gives the trainer its GPUs alone inside; the engines hold that version before and after."""


def _no_scope(version: WeightVersion) -> AbstractAsyncContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSet:
    """Held-out samples that are labels, split for the trainer's ranks."""

    batch: TrainBatch
    steps: tuple[StepPlan, ...]

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Group],
        config: BatchConfig,
        *,
        num_ranks: int,
        context_ranks: int,
        cost: ForwardCost | None = None,
        shares_prefixes: bool = False,
    ) -> LabelledSet:
        # Labels come from no weights, so that any version will do.
        batch = build_batch(groups, version=0, has_rewards=False)
        steps = plan_steps(
            batch,
            config,
            num_ranks=num_ranks,
            context_ranks=context_ranks,
            cost=cost,
            shares_prefixes=shares_prefixes,
        )
        return cls(batch=batch, steps=tuple(steps))


class HeldOutLoss:
    """Measures the loss of the trainer's current weights.

    Args:
        sets: by name.
        compute: computes the loss of one set.
        scope: entered once for all sets, where engines hold the trainer's GPUs during an evaluation.

    Example:
        held_out = HeldOutLoss({"gsm8k": labelled}, compute=trainers.eval_loss)
        metrics = await held_out.run(version)  # {"eval/gsm8k/loss": 1.7, "eval/loss": 1.7}
    """

    def __init__(
        self, sets: Mapping[str, LabelledSet], *, compute: ComputeLoss, scope: TrainerScope = _no_scope
    ) -> None:
        self._sets, self._compute, self._scope = dict(sets), compute, scope

    async def run(self, version: WeightVersion) -> dict[str, float]:
        """`eval/<set>/loss` per token for every set, and `eval/loss`, the mean over the sets; empty without sets."""
        if not self._sets:
            return {}
        # One scope for all sets: each release and resume of the engines moves all their weights.
        async with self._scope(version):
            losses = {name: await self._compute(each.batch, each.steps) for name, each in self._sets.items()}
        return {f"eval/{name}/loss": loss for name, loss in losses.items()} | {"eval/loss": fmean(losses.values())}
