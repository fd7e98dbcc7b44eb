"""A model that is trained: its chunks with gradient buffers, its optimiser, and one optimiser step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from rlscale.config import ComputeDtype, OptimConfig
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_state, save_state
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.model_parameters import freeze_model, freeze_mtp
from rlscale.training.megatron.optim import (
    gradient_buffers,
    make_optimizer,
    optim_step,
    optimizer_tensors,
    shards_state,
    wrap_chunks,
    zero_gradients,
)
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.step import StageFunction, forward_backward
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.optim.step_checks import StepSettings, check_loss
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.trainer_state import TrainerProgress


class TrainableModel:
    """The rank's part of a model with its optimiser. Every method but `add_to` is a collective.

    Args:
        model: with its initial weights.
        optim: settings of this model's optimiser.
        rank: of the trainer.
    """

    def __init__(self, model: MegatronModel, *, optim: OptimConfig, rank: MegatronRank) -> None:
        spec = rank.spec
        self.model, self._dims, self._async_saver = model, rank.dims, rank.async_saver
        # Before gradients get their buffers
        freeze_model(model, spec.train)
        freeze_mtp(model)
        self.chunks = wrap_chunks(model, is_sharded=shards_state(spec.megatron, optim))
        is_bf16 = spec.train.dtype == ComputeDtype.bfloat16
        self.optimizer = make_optimizer(self.chunks, model=model, optim=optim, megatron=spec.megatron, is_bf16=is_bf16)

    def train_step(
        self,
        micros: Sequence[Microbatch],
        *,
        loss: StageFunction,
        metrics: MetricSums,
        settings: StepSettings,
        extra_loss: StageFunction | None = None,
    ) -> dict[str, float]:
        """Accumulates the gradient over the micro-batches, checks and clips it, and makes one optimiser step.

        Args:
            micros: of this rank.
            loss: share of the loss of one micro-batch.
            metrics: the sums that `loss` adds to.
            settings: number, rate and clipping.
            extra_loss: share of a further loss of one micro-batch, which the metric `loss` does not contain.

        Returns:
            Metrics over all ranks, with `loss`, `grad_norm` and `lr`.

        Raises:
            WorkerError: loss or gradient is not finite. Raised on every rank, before any weight is changed.
        """
        dims = self._dims
        zero_gradients(self.chunks, self.optimizer)
        counted = partial(_counted_loss, loss=loss, metrics=metrics, extra_loss=extra_loss)
        forward_backward(self.chunks, micros, loss=counted)
        # Only the last stage has losses and metrics; every rank checks and reports the same.
        sums, shares = metrics.gather(keep_empty=True)
        result, losses, ranks = dims.broadcast_from_last_stage((sums, shares.get("loss", []), dims.data_ranks))
        check_loss(losses, step=settings.number, ranks=ranks, role=settings.role)
        norm = optim_step(self.optimizer, settings=settings, named_parameters=list(self.model.named_parameters()))
        return result | {"grad_norm": norm, "lr": settings.lr}

    def save(self, folder: Path, *, progress: TrainerProgress) -> None:
        """Writes weights, master weights, moments and random states into an existing folder."""
        save_state(folder, model=self.model, optimizer=self.optimizer, progress=progress, async_saver=self._async_saver)

    def load(self, folder: Path) -> TrainerProgress:
        """The inverse of `save`; raises as `load_state`."""
        return load_state(folder, model=self.model, optimizer=self.optimizer)

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers weights, optimiser state and gradient buffers with the offloader; no collective."""
        offloader.add(name, self._weights)
        offloader.add(
            f"{name}.optimizer",
            lambda: optimizer_tensors(self.optimizer, exclude=self._weights()),
            scratch=lambda: gradient_buffers(self.chunks),
        )

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self.model.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()


def _counted_loss(
    micro: Microbatch,
    hidden: Tensor,
    decoder: MegatronDecoder,
    *,
    loss: StageFunction,
    metrics: MetricSums,
    extra_loss: StageFunction | None,
) -> Tensor:
    """Adds the share of the loss to the metrics."""
    share = loss(micro, hidden, decoder)
    metrics.add_share("loss", share)
    return share if extra_loss is None else share + extra_loss(micro, hidden, decoder)
