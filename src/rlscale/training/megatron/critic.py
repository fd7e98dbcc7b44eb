"""The critic on Megatron-core: the value model of ppo, on the policy's ranks or on dedicated ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from rlscale.config import ModelConfig
from rlscale.training.loss.value_loss import ValueLoss, critic_optim_config, critic_step_settings
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights
from rlscale.training.megatron.hf_mapping.load_hf import load_hf
from rlscale.training.megatron.hooks import call_before_logprobs, call_before_step
from rlscale.training.megatron.model.megatron_model import (
    DTYPES,
    VALUE_HEAD,
    MegatronDecoder,
    MegatronModel,
    build_model,
    configure_pipeline,
)
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.scorers import separate_model_config
from rlscale.training.megatron.step import score_column
from rlscale.training.megatron.trainable import TrainableModel
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns, all_reduce_column
from rlscale.training.spec import CriticSpec
from rlscale.training.trainer_state import (
    CRITIC_FOLDER,
    TrainerProgress,
    critic_checkpoint,
    critic_folder,
    has_saved_critic,
)


class MegatronCritic:
    """The rank's part of a model with a value head, its optimiser and schedule; see `CriticRole`."""

    def __init__(self, critic: CriticSpec, *, rank: MegatronRank) -> None:
        self._critic, self._rank = critic, rank
        optim = critic_optim_config(rank.spec.optim, critic)
        model = _build_initial_model(critic, rank=rank)
        self.trainable = TrainableModel(model, optim=optim, rank=rank)
        self._schedule = LrSchedule.from_config(optim, total_steps=rank.spec.total_steps)
        self.num_steps = 0  # finished

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole."""
        self.trainable.add_to(offloader, name=name)

    def compute_values(self, rollout: PackedRollout) -> Tensor:
        """See CriticRole."""
        rank, chunks = self._rank, self.trainable.model.chunks
        with rollout.timed("values"):
            call_before_logprobs(rank.spec, chunks, role="critic")
            column = score_column(
                chunks, rollout.scoring_micros, dims=rank.dims, entries=_values, num_tokens=rollout.num_tokens
            )
            values = all_reduce_column(column, device=rank.device, group=rollout.data_group)
        assert values is not None, "computed above"
        return values

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """See CriticRole."""
        spec, device = self._rank.spec, self._rank.device
        metrics = MetricSums(device, group=self._rank.dims.data_group)
        lr = self._schedule.at(self.num_steps)
        settings = critic_step_settings(spec, self._critic, number=self.num_steps, lr=lr)
        loss = ValueLoss(spec, rollout, columns, step=step, metrics=metrics, device=device)
        chunks, optimizer = self.trainable.chunks, self.trainable.optimizer
        call_before_step(spec, chunks, optimizer, rollout_id=rollout.batch.rollout_id, step_id=self.num_steps)
        micros, stage_loss = rollout.micros[step], partial(_stage_loss, loss=loss)
        result = self.trainable.train_step(micros, loss=stage_loss, metrics=metrics, settings=settings)
        self.num_steps += 1
        return {f"critic_{name}": value for name, value in result.items()}

    def save(self, folder: Path) -> None:
        """See CriticRole."""
        with critic_checkpoint(self._critic, folder) as own:
            self.trainable.save(own, progress=TrainerProgress(num_steps=self.num_steps))

    def load(self, folder: Path) -> None:
        """See CriticRole."""
        if has_saved_critic(self._critic, folder):
            self.num_steps = self.trainable.load(critic_folder(self._critic, folder)).num_steps


def _stage_loss(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder, *, loss: ValueLoss) -> Tensor:
    """The micro-batch's share of the critic's loss, from its hidden states."""
    return loss.compute(micro, values=_values(micro, hidden, decoder))


def _values(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
    """The value before each trainable token. [R]"""
    return micro.gather_shards(decoder.values(hidden.flatten(0, 1).index_select(0, micro.logit_rows)))


def _build_initial_model(critic: CriticSpec, *, rank: MegatronRank) -> MegatronModel:
    """The model with weights of a Hugging Face folder, or of a checkpoint's critic or, if it has none, policy."""
    spec, path, checkpoint = rank.spec, critic.source.path, critic.source.checkpoint
    config = ModelConfig(
        use_hf_config_for_megatron=True, custom_model_provider_path=spec.model.custom_model_provider_path
    )
    model = build_model(
        path,
        model=config,
        megatron=separate_model_config(spec.megatron),
        dtype=DTYPES[spec.train.dtype],
        has_value_head=True,
        custom=spec.custom,
    )
    if checkpoint is None:
        load_hf(model, path)
    elif (checkpoint / CRITIC_FOLDER).is_dir():
        load_weights(checkpoint / CRITIC_FOLDER, model=model)
    else:
        # A policy has no value head: the new one stays.
        load_weights(checkpoint, model=model, skip_prefix=VALUE_HEAD)
    return configure_pipeline(model, rank.dims)
