"""The critic on Megatron-core: the value model of ppo, on the policy's ranks or on ranks of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from rlscale.config import ModelConfig
from rlscale.training.loss.value_loss import ValueLoss, critic_rates, critic_settings
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
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.scorers import own_model_config
from rlscale.training.megatron.step import score
from rlscale.training.megatron.trainable import TrainableModel
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns, all_reduce_column
from rlscale.training.spec import CriticSpec, TrainerSpec
from rlscale.training.trainer_state import (
    CRITIC_FOLDER,
    TrainerProgress,
    critic_checkpoint,
    critic_folder,
    has_saved_critic,
)


class MegatronCritic:
    """This rank's part of a model with a value head, with optimiser and schedule. Every method is a collective."""

    def __init__(self, critic: CriticSpec, *, on: MegatronRank) -> None:
        self._spec, self._critic, self._dims, self._device = on.spec, critic, on.dims, on.device
        spec, dims = on.spec, on.dims
        optim = critic_rates(spec.optim, critic)
        model = _first_model(spec, critic, dims=dims)
        self.trained = TrainableModel(spec, model, optim=optim, dims=dims, async_saver=on.async_saver)
        self._schedule = LrSchedule.from_config(optim, total_steps=spec.total_steps)
        self.num_steps = 0  # made

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers weights and optimiser state; no collective."""
        self.trained.add_to(offloader, name=name)

    def compute_values(self, rollout: PackedRollout) -> Tensor:
        """See CriticRole. [T]"""
        with rollout.timed("values"):
            call_before_logprobs(self._spec, self.trained.model.chunks, role="critic")
            column = score(
                self.trained.model.chunks,
                rollout.scoring_micros,
                dims=self._dims,
                entries_of=_values,
                num_tokens=rollout.num_tokens,
            )
            values = all_reduce_column(column, device=self._device, group=rollout.data_group)
        assert values is not None, "there is a column"
        return values

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """See CriticRole. Raises as `TrainableModel.step`."""
        metrics = MetricSums(self._device, group=self._dims.data_group)
        lr = self._schedule.at(self.num_steps)
        settings = critic_settings(self._spec, self._critic, number=self.num_steps, lr=lr)
        loss = ValueLoss(self._spec, rollout, columns, step=step, metrics=metrics, device=self._device)
        call_before_step(
            self._spec,
            self.trained.chunks,
            self.trained.optimizer,
            rollout_id=rollout.batch.version,
            step_id=self.num_steps,
        )
        loss_of = partial(_micro_loss, loss)
        result = self.trained.step(rollout.micros[step], loss_of=loss_of, metrics=metrics, settings=settings)
        self.num_steps += 1
        return {f"critic_{name}": value for name, value in result.items()}

    def save(self, folder: Path) -> None:
        """See CriticRole."""
        with critic_checkpoint(self._critic, folder) as own:
            self.trained.save(own, progress=TrainerProgress(num_steps=self.num_steps))

    def load(self, folder: Path) -> None:
        """The inverse of `save`. A checkpoint of a run without a critic leaves it as it was made.

        Raises:
            DataError: what is there is another critic, or it is missing in `critic.save`.
        """
        if has_saved_critic(self._critic, folder):
            self.num_steps = self.trained.load(critic_folder(self._critic, folder)).num_steps


def _micro_loss(loss: ValueLoss, micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
    """A micro-batch's share of the loss, on the last stage."""
    return loss.compute(micro, values=_values(micro, hidden, decoder))


def _values(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
    """Before each trainable token. [R]"""
    return micro.gather_shards(decoder.values(hidden.flatten(0, 1).index_select(0, micro.logit_rows)))


def _first_model(spec: TrainerSpec, critic: CriticSpec, *, dims: ParallelDims) -> MegatronModel:
    """With the weights of a folder, of the critic of a checkpoint or, where it has none, of its policy."""
    path, checkpoint = critic.source.path, critic.source.checkpoint
    config = ModelConfig(
        use_hf_config_for_megatron=True, custom_model_provider_path=spec.model.custom_model_provider_path
    )
    model = build_model(
        path,
        model=config,
        megatron=own_model_config(spec.megatron),
        dtype=DTYPES[spec.train.dtype],
        has_value_head=True,
        custom=spec.custom,
    )
    if checkpoint is None:
        load_hf(model, path)
    elif (checkpoint / CRITIC_FOLDER).is_dir():
        load_weights(checkpoint / CRITIC_FOLDER, model=model)
    else:
        load_weights(checkpoint, model=model, skip_prefix=VALUE_HEAD)
    return configure_pipeline(model, dims)
