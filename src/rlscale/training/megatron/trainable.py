"""A model that is trained: its chunks in buffers for gradients, its optimiser, and one step of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from rlscale.config import ComputeDtype, OptimConfig
from rlscale.training.megatron.checkpoint.async_save import AsyncSaver
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_state, save_state
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.optim import (
    apply_gradients,
    gradient_buffers,
    make_optimizer,
    optimizer_tensors,
    wrap_chunks,
    zero_gradients,
)
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.step import StageLoss, run_microbatches
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.optim.step_checks import StepSettings, check_loss
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import TrainerProgress


class TrainableModel:
    """This rank's part of a model with its optimiser. Every method is a collective.

    Args:
        model: holding its first weights.
        optim: of this model.
        async_saver: what writes its checkpoints; None: `save` does.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        model: MegatronModel,
        *,
        optim: OptimConfig,
        dims: ParallelDims,
        async_saver: AsyncSaver | None,
    ) -> None:
        self.model, self._dims, self._async_saver = model, dims, async_saver
        self.chunks = wrap_chunks(model, megatron=spec.megatron)
        is_bf16 = spec.train.dtype == ComputeDtype.bfloat16
        self.optimizer = make_optimizer(self.chunks, optim=optim, megatron=spec.megatron, is_bf16=is_bf16)

    def step(
        self, micros: Sequence[Microbatch], *, loss_of: StageLoss, metrics: MetricSums, settings: StepSettings
    ) -> dict[str, float]:
        """Adds up the gradient over the micro-batches, checks and clips it, and steps.

        Args:
            micros: of this rank.
            loss_of: share of the loss of one micro-batch.
            metrics: the sums `loss_of` adds to.
            settings: number, rate and clipping.

        Returns:
            Metrics over all ranks, with `loss`, `grad_norm` and `lr`.

        Raises:
            WorkerError: loss or gradient is not finite. Raised on every rank, before any weight is changed.
        """

        def counted(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
            share = loss_of(micro, hidden, decoder)
            metrics.add_share("loss", share)
            return share

        dims = self._dims
        zero_gradients(self.chunks, self.optimizer)
        run_microbatches(self.chunks, micros, loss_of=counted)
        sums, shares = metrics.gather(keep_empty=True)
        result, losses, ranks = dims.broadcast_from_last_stage((sums, shares.get("loss", []), dims.data_ranks))
        check_loss(losses, step=settings.number, ranks=ranks, role=settings.role)
        norm = apply_gradients(self.optimizer, settings=settings, named_parameters=list(self.model.named_parameters()))
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
            lambda: optimizer_tensors(self.optimizer, but=self._weights()),
            scratch=lambda: gradient_buffers(self.chunks),
        )

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self.model.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()
