"""The critic: the value model of ppo, on the policy's ranks or on ranks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlscale.training.checkpoint_dirs import begin_version, end_version
from rlscale.training.fsdp.checkpoint import load_state, save_state
from rlscale.training.fsdp.model import load_sharded, reshard
from rlscale.training.fsdp.sources import load_weights
from rlscale.training.fsdp.step import logits_of, optimizer_step
from rlscale.training.loss.value_loss import (
    FOLDER,
    ValueLoss,
    critic_folder,
    critic_rates,
    critic_settings,
    has_saved_critic,
)
from rlscale.training.metrics import MetricSums
from rlscale.training.modules.value_head import squeeze_values
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.optim.optimizer import make_optimizer
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import Rollout, all_reduce_column
from rlscale.training.spec import CriticSpec, TrainerSpec
from rlscale.training.trainer_state import Position
from rlscale.types import StepPlan


class Critic:
    """Model with a value head, optimiser and schedule. Every method is a collective.

    Example:
        critic = Critic(spec, spec.critic, mesh=mesh, device=device)
        critic.score(rollout)           # before the advantages
        critic.step(rollout, plan=plan, micros=rollout.micros[0])
    """

    def __init__(self, spec: TrainerSpec, critic: CriticSpec, *, mesh: DeviceMesh, device: torch.device) -> None:
        self._spec, self._critic, self._device = spec, critic, device
        source = critic.source
        self.model = load_sharded(
            source.path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=True, has_value_head=True
        )
        if source.checkpoint is not None:
            _load_first_weights(self.model, source.checkpoint)
        optim = critic_rates(spec.optim, critic)
        self.optimizer = make_optimizer(self.model, optim=optim)
        self._schedule = LrSchedule.from_config(optim, total_steps=spec.total_steps)
        self.num_steps = 0  # made

    @torch.no_grad()
    def score(self, rollout: Rollout) -> None:
        """Fills `values`, on every rank those of all."""
        with rollout.timed("values"):
            column = torch.zeros(len(rollout.batch.tokens))
            for micro in rollout.scored:
                values, trainable = self._values(micro).cpu(), micro.layout.mask_T.cpu()
                column[torch.from_numpy(micro.batch_rows)[trainable]] = values[trainable]
            reshard(self.model)
            rollout.values = all_reduce_column(column, device=self._device, group=rollout.data_group)

    def step(self, rollout: Rollout, *, plan: StepPlan, micros: Sequence[Microbatch]) -> dict[str, float]:
        """One optimiser step. Returns its metrics, `critic_...`; raises as `optimizer_step`."""
        metrics = MetricSums(self._device)
        lr = self._schedule.at(self.num_steps)
        settings = critic_settings(self._spec, self._critic, number=self.num_steps, lr=lr)
        loss = ValueLoss(self._spec, rollout, plan=plan, metrics=metrics, device=self._device)
        result = optimizer_step(
            self.model,
            self.optimizer,
            micros=micros,
            loss_of=lambda micro: loss(micro, values=self._values(micro)),
            metrics=metrics,
            settings=settings,
        )
        self.num_steps += 1
        return {f"critic_{name}": value for name, value in result.items()}

    def save(self, folder: Path) -> None:
        """Writes the critic's part of the checkpoint in `folder`, or beside it with `critic.save`."""
        own = critic_folder(self._critic, folder)
        begin_version(own)
        position = Position(num_steps=self.num_steps)
        save_state(own, model=self.model, optimizer=self.optimizer, reference=None, position=position)
        if self._critic.save is not None:
            end_version(own, keep_last=self._critic.keep_last)

    def load(self, folder: Path) -> None:
        """The inverse of `save`. A checkpoint of a run without a critic leaves it as it was made.

        Raises:
            DataError: what is there is another critic, or it is missing in `critic.save`.
        """
        if has_saved_critic(self._critic, folder):
            own = critic_folder(self._critic, folder)
            position = load_state(own, model=self.model, optimizer=self.optimizer, reference=None)
            self.num_steps = position.num_steps

    def _values(self, micro: Microbatch) -> Tensor:
        """Before each trainable token. [R]"""
        return micro.whole(squeeze_values(logits_of(self.model, micro)))


def _load_first_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """From the critic of a checkpoint or, where it has none, from its policy, under a new value head."""
    critic = checkpoint / FOLDER
    load_weights(
        critic if critic.is_dir() else checkpoint, model=model, but=("lm_head",) if not critic.is_dir() else ()
    )
