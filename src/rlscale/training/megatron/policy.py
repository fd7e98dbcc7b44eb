"""The policy on Megatron-core: model, optimiser and schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlscale.config import ComputeDtype, uses_reference
from rlscale.training.megatron.checkpoint import load_weights
from rlscale.training.megatron.grid import MegatronGrid
from rlscale.training.megatron.head import LogprobHead
from rlscale.training.megatron.model import build_model
from rlscale.training.megatron.names.load import load_hf
from rlscale.training.megatron.optim import apply_gradients, make_optimizer, wrap_chunks, zero_gradients
from rlscale.training.megatron.reference import ReferenceWeights
from rlscale.training.megatron.step import run_microbatches, score
from rlscale.training.metrics import MetricSums
from rlscale.training.packing import Microbatch
from rlscale.training.policy_loss import PolicyLoss, compare
from rlscale.training.rollout import Rollout, pick
from rlscale.training.schedule import LrSchedule
from rlscale.training.settings import StepSettings, check_loss
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan


class MegatronPolicy:
    """This rank's part of the policy, and of the reference where there is one. Every method is a collective."""

    def __init__(self, spec: TrainerSpec, *, grid: MegatronGrid, device: torch.device) -> None:
        self._spec, self._grid, self._device = spec, grid, device
        is_bf16 = spec.train.dtype == ComputeDtype.bfloat16
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        self.model = build_model(
            spec.model_path,
            model=spec.model,
            megatron=spec.megatron,
            dtype=self.dtype,
        )
        if grid.num_virtual_stages > 1:
            # Its messages cannot tell of lengths; micro-batches are filled up to one.
            self.model.config.variable_seq_lengths = False
        self._reference = self._load_reference()
        load_hf(self.model, spec.model_path)
        self._head = LogprobHead(
            vocab_size=self.model.architecture.vocab_size,
            first=self.model.first_token,
            temperature=spec.temperature,
            chunk_tokens=spec.train.log_probs_chunk_size,
            group=grid.tensor_group if grid.tensor_size > 1 else None,
        )
        self.chunks = wrap_chunks(self.model, megatron=spec.megatron)
        self.optimizer = make_optimizer(self.chunks, optim=spec.optim, megatron=spec.megatron, is_bf16=is_bf16)
        self._schedule = LrSchedule.from_config(spec.optim, total_steps=spec.total_steps)
        self.num_steps = 0  # made

    def score_old(self, rollout: Rollout) -> None:
        """Fills `old`, and the metrics that come from it."""
        algo = self._spec.algo
        with rollout.timed("old_logprobs"):
            old = self._score(rollout, entropies=rollout.metrics if algo.use_rollout_entropy else None)
        rollout.has_entropy = algo.use_rollout_entropy
        if algo.use_rollout_logprobs:
            return
        rollout.old = old
        if not self._grid.is_last_stage:
            return
        for micro in rollout.flat:
            lp = pick(rollout.old, micro)
            compare(rollout, micro, trainer=lp)
            rollout.asked.add(micro, lp)

    def score_reference(self, rollout: Rollout) -> None:
        """Fills `ref`, where there is a reference."""
        if self._reference is None:
            return
        with rollout.timed("ref_logprobs"), self._reference.in_place_of(self.model.chunks):
            rollout.ref = self._score(rollout)

    def step(
        self, rollout: Rollout, *, plan: StepPlan, micros: Sequence[Microbatch], is_first: bool
    ) -> dict[str, float]:
        """One optimiser step. Returns its metrics, the same on every rank.

        Raises:
            WorkerError: loss or gradient is not finite. Raised on every rank, before any weight is changed.
        """
        grid = self._grid
        metrics = MetricSums(self._device, group=grid.data_group)
        settings = StepSettings(
            number=self.num_steps,
            lr=self._schedule.at(self.num_steps),
            max_grad_norm=self._spec.optim.clip_grad,
        )
        loss = PolicyLoss(self._spec, rollout, plan=plan, metrics=metrics, is_first=is_first, device=self._device)

        def loss_of(micro: Microbatch, lp: Tensor, entropy: Tensor) -> Tensor:
            share = loss(micro, lp=lp, entropy=entropy)
            metrics.add_share("loss", share)
            return share

        zero_gradients(self.chunks, self.optimizer)
        run_microbatches(self.chunks, micros, head=self._head, loss_of=loss_of, entropy_grad=loss.entropy_grad)
        sums, shares = metrics.gather(keep_empty=True)
        result, losses, ranks = grid.from_last_stage((sums, shares.get("loss", []), grid.data_ranks))
        check_loss(losses, step=settings.number, ranks=ranks)
        norm = apply_gradients(self.optimizer, settings=settings, named_parameters=list(self.model.named_parameters()))
        self.num_steps += 1
        return result | {"grad_norm": norm, "lr": settings.lr}

    def _score(self, rollout: Rollout, *, entropies: MetricSums | None = None) -> Tensor:
        return score(
            self.chunks,
            rollout.scored,
            grid=self._grid,
            head=self._head,
            num_tokens=len(rollout.batch.tokens),
            entropies=entropies,
        )

    def _load_reference(self) -> ReferenceWeights | None:
        spec = self._spec
        if spec.ref_path is None or not uses_reference(spec.algo):
            return None
        if spec.ref_checkpoint is None:
            load_hf(self.model, spec.ref_path)
        else:
            load_weights(spec.ref_checkpoint, model=self.model)
        return ReferenceWeights(self.model.chunks)
