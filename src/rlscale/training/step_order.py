"""Order of the optimiser steps of a rollout over several passes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlscale.training.rollout_state import TrainColumns
from rlscale.training.spec import TrainerSpec


class OrderedStep(NamedTuple):
    """One optimiser step of a rollout."""

    step: int  # index into the plans of the rollout
    epoch: int  # pass over the rollout, from 0

    def select(self, columns: TrainColumns) -> TrainColumns:
        """The columns for this step: the same in every pass, which they note."""
        return columns if self.epoch == 0 else replace(columns, is_first_pass=False)


def order_steps(num_steps: int, spec: TrainerSpec, *, rollout_id: int) -> list[OrderedStep]:
    """The steps of all passes: `algo.ppo_epochs` times each plan, the first time in the order of the plans.

    A later pass permutes the plans by a generator of `train.seed`, the rollout and the pass alone. So ranks of policy
    and critic agree, and a resumed run repeats the order.

    Args:
        num_steps: plans of the rollout.
        spec: of the trainer.
        rollout_id: of the rollout.
    """
    orders = [np.arange(num_steps)]
    for epoch in range(1, spec.algo.ppo_epochs):
        orders.append(np.random.default_rng([spec.train.seed, rollout_id, epoch]).permutation(num_steps))
    return [OrderedStep(int(step), epoch) for epoch, order in enumerate(orders) for step in order]
