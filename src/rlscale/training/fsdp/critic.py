"""The critic on FSDP2: the value model of ppo, on the policy's ranks or on dedicated ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rlscale.training.fsdp.checkpoint import load_state, load_weights, save_state
from rlscale.training.fsdp.model import load_sharded, reshard
from rlscale.training.fsdp.rank import FsdpRank
from rlscale.training.fsdp.step import backward, compute_logits, iterate_micros, optim_step
from rlscale.training.loss.value_loss import ValueLoss, critic_optim_config, critic_step_settings
from rlscale.training.metrics import MetricSums
from rlscale.training.modules.value_head import squeeze_values
from rlscale.training.offload import Offloader, state_tensors
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.optim.optimizer import make_optimizer
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns, all_reduce_column, write_microbatch
from rlscale.training.spec import CriticSpec, TrainerSpec
from rlscale.training.trainer_state import (
    CRITIC_FOLDER,
    TrainerProgress,
    critic_checkpoint,
    critic_folder,
    has_saved_critic,
)


class FsdpCritic:
    """Model with a value head, optimiser and schedule; see `CriticRole`.

    Every method but `add_to` is a collective of all ranks.

    Example:
        critic = FsdpCritic(spec, spec.critic, rank=rank)
        values = critic.compute_values(rollout)         # before the advantages
        critic.train_step(rollout, columns, step=0)
    """

    def __init__(self, spec: TrainerSpec, critic: CriticSpec, *, rank: FsdpRank) -> None:
        self._spec, self._critic, self._device = spec, critic, rank.device
        source = critic.source
        self.model = load_sharded(
            source.path, mesh=rank.mesh, fsdp=spec.fsdp, train=spec.train, is_trained=True, has_value_head=True
        )
        if source.checkpoint is not None:
            _load_first_weights(self.model, source.checkpoint)
        optim = critic_optim_config(spec.optim, critic)
        self.optimizer = make_optimizer(self.model, optim=optim)
        self._schedule = LrSchedule.from_config(optim, total_steps=spec.total_steps)
        self.num_steps = 0  # finished

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers parameters and optimiser state; no collective."""
        offloader.add(name, self.model.parameters)
        offloader.add(f"{name}.optimizer", partial(state_tensors, self.optimizer))

    @torch.no_grad()
    def compute_values(self, rollout: PackedRollout) -> Tensor:
        """See CriticRole. [T]"""
        with rollout.timed("values"):
            column = torch.zeros(rollout.num_tokens)
            for micro in rollout.scoring_micros:
                write_microbatch(column, micro, self._values(micro).cpu())
            reshard(self.model)
            values = all_reduce_column(column, device=self._device, group=rollout.data_group)
        assert values is not None, "there is a column"
        return values

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """Makes one optimiser step and returns its metrics as `critic_<name>`. Raises as `optim_step`."""
        metrics = MetricSums(self._device)
        loss = ValueLoss(self._spec, rollout, columns, step=step, metrics=metrics, device=self._device)
        self._forward_backward(rollout.micros[step], loss=loss, metrics=metrics)
        lr = self._schedule.at(self.num_steps)
        settings = critic_step_settings(self._spec, self._critic, number=self.num_steps, lr=lr)
        result = optim_step(self.model, self.optimizer, metrics=metrics, settings=settings)
        self.num_steps += 1
        return {f"critic_{name}": value for name, value in result.items()}

    def _forward_backward(self, micros: Sequence[Microbatch], *, loss: ValueLoss, metrics: MetricSums) -> None:
        """Accumulates the gradient over the micro-batches of a step."""
        for micro in iterate_micros(self.model, micros):
            backward(loss.compute(micro, values=self._values(micro)), micro, metrics=metrics)

    def _values(self, micro: Microbatch) -> Tensor:
        """Value before each trainable token. [R]"""
        return micro.gather_shards(squeeze_values(compute_logits(self.model, micro)))

    def save(self, folder: Path) -> None:
        """See CriticRole."""
        progress = TrainerProgress(num_steps=self.num_steps)
        with critic_checkpoint(self._critic, folder) as own:
            save_state(own, model=self.model, optimizer=self.optimizer, reference=None, progress=progress)

    def load(self, folder: Path) -> None:
        """See CriticRole."""
        if has_saved_critic(self._critic, folder):
            own = critic_folder(self._critic, folder)
            progress = load_state(own, model=self.model, optimizer=self.optimizer, reference=None)
            self.num_steps = progress.num_steps


def _load_first_weights(model: nn.Module, checkpoint: Path) -> None:
    """Loads the critic of a checkpoint or, where it has none, its policy below a new value head."""
    critic = checkpoint / CRITIC_FOLDER
    if critic.is_dir():
        load_weights(critic, model=model)
    else:
        load_weights(checkpoint, model=model, skip=("lm_head",))
