"""What the critics of both backends have in common: settings, loss and the place of their checkpoints."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlscale.algo.losses import value_loss
from rlscale.config import OptimConfig
from rlscale.training.loss.token_loss import reduction
from rlscale.training.metrics import MetricSums
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import Rollout, take_microbatch
from rlscale.training.spec import CriticSpec, TrainerSpec
from rlscale.types import StepPlan

FOLDER = "critic"

log = logging.getLogger(__name__)


class ValueLoss:
    """The loss of one optimiser step of the critic, micro-batch by micro-batch.

    Example:
        loss = ValueLoss(spec, rollout, plan=plan, metrics=metrics, device=device)
        loss(micro, values=values_R).backward()   # once for each micro-batch of this rank
    """

    def __init__(
        self, spec: TrainerSpec, rollout: Rollout, *, plan: StepPlan, metrics: MetricSums, device: torch.device
    ) -> None:
        assert spec.critic is not None, "there is a critic"
        self._spec, self._clip = spec, spec.critic.value_clip
        self._rollout, self._plan, self._metrics = rollout, plan, metrics
        self._denominators_S = rollout.denominators(plan).to(device)

    def __call__(self, micro: Microbatch, *, values: Tensor) -> Tensor:
        """The micro-batch's share of the step's loss, with gradient; its metrics are added up beside it.

        Args:
            micro: of this rank.
            values: before each trainable token. [R]
        """
        old, returns = take_microbatch(self._rollout.values, micro), take_microbatch(self._rollout.returns, micro)
        assert old is not None and returns is not None, "values and returns come first"
        losses, sums = value_loss(values, old_values_T=old, returns_T=returns, layout=micro.layout, clip=self._clip)
        self._metrics.add(sums | {"value_error": micro.layout.sum_and_count((old - returns).square())})
        samples = torch.from_numpy(micro.sample_indices).to(values.device)
        reduce = reduction(
            self._spec.algo,
            plan=self._plan,
            layout=micro.layout,
            denominators_S=self._denominators_S[samples],
            max_response_len=self._spec.max_response_len,
        )
        return reduce(losses)


def critic_rates(optim: OptimConfig, critic: CriticSpec) -> OptimConfig:
    """The policy's settings with the critic's learning rate, which is one for all kinds of parameters."""
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


def critic_settings(spec: TrainerSpec, critic: CriticSpec, *, number: int, lr: float) -> StepSettings:
    """Of one optimiser step."""
    role = "actor" if critic.own_ranks is None else "critic"
    return StepSettings(number=number, lr=lr, max_grad_norm=spec.optim.clip_grad, role=role)


def critic_folder(critic: CriticSpec, folder: Path) -> Path:
    """Where the critic's part of a checkpoint is: in it, or beside it with `critic.save`."""
    # A checkpoint that is being written has an ending that it loses when it is complete.
    name = folder.name.partition(".")[0]
    return folder / FOLDER if critic.save is None else critic.save / name


def has_saved_critic(critic: CriticSpec, folder: Path) -> bool:
    """Whether there is a critic to load; a warning where the checkpoint is of a run without one."""
    if critic.save is None and not critic_folder(critic, folder).is_dir():
        log.warning("%s has no critic; it begins anew", folder)
        return False
    return True
