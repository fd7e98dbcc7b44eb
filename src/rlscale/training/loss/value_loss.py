"""Loss of the critic for one micro-batch, and the settings of its optimiser steps.

Shape legend: R trainable tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlscale.algo.losses import value_loss
from rlscale.config import OptimConfig
from rlscale.training.loss.token_loss import StepReduction
from rlscale.training.metrics import MetricSums
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns, take_microbatch
from rlscale.training.spec import CriticSpec, TrainerSpec


class ValueLoss:
    """Loss of one optimiser step of the critic, micro-batch by micro-batch.

    Example:
        loss = ValueLoss(spec, rollout, columns, step=0, metrics=metrics, device=device)
        loss.compute(micro, values=values_R).backward()   # for each micro-batch of this rank
    """

    def __init__(
        self,
        spec: TrainerSpec,
        rollout: PackedRollout,
        columns: TrainColumns,
        *,
        step: int,
        metrics: MetricSums,
        device: torch.device,
    ) -> None:
        assert spec.critic is not None, "there is a critic"
        self._columns, self._metrics, self._clip = columns, metrics, spec.critic.value_clip
        plan = rollout.steps[step]
        # A reducer of the user is of the policy: the critic averages without it.
        self._reduction = StepReduction(
            algo=spec.algo,
            plan=plan,
            denominators_S=rollout.denominators(plan).to(device),
            max_response_len=spec.max_response_len,
        )

    def compute(self, micro: Microbatch, *, values: Tensor) -> Tensor:
        """The micro-batch's share of the loss of the step, with gradient; adds up its metrics.

        Args:
            micro: of this rank.
            values: before each trainable token. [R]
        """
        old, returns = take_microbatch(self._columns.values, micro), take_microbatch(self._columns.returns, micro)
        assert old is not None and returns is not None, "values and returns come first"
        losses, sums = value_loss(values, old_values_T=old, returns_T=returns, layout=micro.layout, clip=self._clip)
        self._metrics.add(sums | {"value_error": micro.layout.sum_and_count((old - returns).square())})
        samples = torch.from_numpy(micro.sample_indices).to(values.device)
        return self._reduction.reduce(losses, layout=micro.layout, samples=samples)


def critic_optim_config(optim: OptimConfig, critic: CriticSpec) -> OptimConfig:
    """The policy's optimiser settings with the critic's learning rate, for all kinds of parameters."""
    return replace(
        optim,
        lr=critic.lr,
        lr_warmup_iters=critic.lr_warmup_iters,
        warmup_ratio=0.0,
        init_lr_frac=None,
        matrix_lr=None,
        embedding_lr=None,
        unembedding_lr=None,
    )


def critic_step_settings(spec: TrainerSpec, critic: CriticSpec, *, number: int, lr: float) -> StepSettings:
    """Settings of optimiser step `number` of the critic."""
    role = "actor" if critic.dedicated_ranks is None else "critic"
    return StepSettings(number=number, lr=lr, max_grad_norm=spec.optim.clip_grad, role=role)
