"""Order of the passes over a rollout on one trainer rank, shared by both backends.

    pack ─> [old logprobs] ─> [reference] ─> [teacher] ─> [values] ─> advantages ─┐
                                                                                  ▼
    weights to engines <─ optimiser steps of the policy <─ optimiser steps of the critic <─┘

A pass in brackets runs only where the loss needs it. A model is on the device during its own passes; where models share
a device, `Offloader` keeps the others on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.config import LossType, compares_policies
from rlscale.training.batch_invariant.equal_logprobs import check_equal_logprobs
from rlscale.training.loss.column_outputs import add_column_means
from rlscale.training.loss.policy_loss import add_eval_loss, add_logprob_diff
from rlscale.training.loss.teacher_targets import TeacherTargets
from rlscale.training.policy_snapshots import PolicySnapshots
from rlscale.training.prepare import (
    apply_user_postprocess,
    compute_advantages,
    mean_weight_factor,
    needs_old_pass,
)
from rlscale.training.roles import (
    AdapterExporter,
    CriticRole,
    PolicyRole,
    RankContext,
    ReferenceRole,
    TeacherRole,
    WeightExporter,
)
from rlscale.training.rollout_state import PackedRollout, TrainColumns, order_steps, shared_column, take_microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import TrainerProgress
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class RoleBackend(ABC):
    """The models of one rank and the order of their passes. A subclass builds, saves, loads and exports them.

    Invariants: every method but `finish_saving` is a collective of all ranks of the default process group; for the same
    inputs on the same number of ranks the results are bitwise equal; no method but `prepare` and its parts makes
    `TrainColumns`.
    """

    policy: PolicyRole
    critic: CriticRole | None
    reference: ReferenceRole | None
    teacher: TeacherRole | None
    _snapshots: PolicySnapshots[Any] | None
    _exporter: WeightExporter
    adapters: AdapterExporter | None = None
    _reference_model = "reference"  # by its name with the offloader; "policy": its base is the reference

    def __init__(self, spec: TrainerSpec, rank: RankContext) -> None:
        self._spec, self._context = spec, rank
        self._device, self._offloader = rank.device, rank.offloader
        self._num_rollouts = 0  # trained on
        self._current: tuple[PackedRollout, TrainColumns] | None = None  # between `score` and `optimize`

    # -- training

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """See TrainBackend. Raises WorkerError, naming step and rank, for a loss or gradient that is not finite."""
        with self._using_device():
            result = self._optimize(*self.prepare(batch, steps))
        self._offloader.offload_all()
        return result

    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None:
        """First of the three parts of `train` where the critic has dedicated ranks: all passes but the critic's."""
        with self._using_device():
            self._current = self._score(batch, steps)

    def compute_advantages(self, values: Float32) -> Float32:
        """Second part: computes advantages from the critic's values [T] and returns the targets of the values. [T]"""
        assert self._current is not None, "`score` must be called first"
        rollout, columns = self._current
        with self._using_device():
            columns = self._add_advantages(rollout, replace(columns, values=torch.tensor(values)))
        self._current = rollout, columns
        assert columns.returns is not None, "a critic's values have returns"
        return columns.returns.numpy()

    def optimize(self) -> TrainResult:
        """Third part: the optimiser steps. Returns and raises as `train`."""
        assert self._current is not None, "`score` must be called first"
        # Cleared first: the columns are freed even if a step fails.
        current, self._current = self._current, None
        with self._using_device():
            result = self._optimize(*current)
        del current  # what it has on the device needs no copy on the host
        self._offloader.offload_all()
        return result

    def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        """Mean of -logprob over the trainable tokens of all steps, at the training temperature; changes no weight."""
        with self._using_device():
            rollout = self._context.pack_rollout(batch, steps, with_scoring=False)
            with self._offloader.resident("policy"):
                add_eval_loss(rollout, self.policy.compute_logprobs(rollout))
            loss = self._context.gather_metrics(rollout)["loss"]
        del rollout
        self._offloader.offload_all()
        return loss

    def prepare(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> tuple[PackedRollout, TrainColumns]:
        """Packs this rank's micro-batches and computes all columns that the optimiser steps read."""
        rollout, columns = self._score(batch, steps)
        if self.critic is not None:
            with self._offloader.resident("critic"):
                columns = replace(columns, values=self.critic.compute_values(rollout))
        return rollout, self._add_advantages(rollout, columns)

    @contextmanager
    def _using_device(self) -> Iterator[None]:
        """Context of passes: also of the tensors around them, such as micro-batches and metrics."""
        with self._context.computing(), self._offloader.mapped():
            yield

    @property
    def _trains_policy(self) -> bool:
        critic = self._spec.critic
        return critic is None or self._num_rollouts >= critic.num_only_rollouts

    def _score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> tuple[PackedRollout, TrainColumns]:
        """Makes all passes without gradient but the critic's."""
        algo = self._spec.algo
        compares = compares_policies(algo)
        rollout = self._context.pack_rollout(batch, steps, with_scoring=compares)
        if algo.loss_type == LossType.sft_loss:
            return rollout, TrainColumns()
        columns = TrainColumns(rollout_logprobs=shared_column(batch.rollout_logprobs))
        if not compares:
            return rollout, columns
        if algo.use_rollout_logprobs:
            # The same object: later, `is` detects that there are no separate old logprobs.
            columns = replace(columns, old_logprobs=columns.rollout_logprobs)
        if needs_old_pass(self._spec, num_steps=len(steps), trains_policy=self._trains_policy):
            with self._offloader.resident("policy"):
                columns = self._score_old(rollout, columns)
        # Without a step of the policy only a penalty in the rewards reads the reference.
        if self.reference is not None and (self._trains_policy or algo.kl_coef > 0):
            with self._offloader.resident(self._reference_model), rollout.timed("ref_logprobs"):
                columns = replace(columns, ref_logprobs=self.reference.compute_logprobs(rollout))
        if batch.teacher is not None:  # by servers
            targets = TeacherTargets.from_scores(batch.teacher, algo=algo)
            columns = replace(columns, teacher_logprobs=shared_column(batch.teacher.logprobs), teacher=targets)
        elif self.teacher is not None:
            with self._offloader.resident("teacher"), rollout.timed("teacher_logprobs"):
                teacher_logprobs, targets = self.teacher.compute_targets(rollout)
            columns = replace(columns, teacher_logprobs=teacher_logprobs, teacher=targets)
        return rollout, columns

    def _score_old(self, rollout: PackedRollout, columns: TrainColumns) -> TrainColumns:
        """Runs the pass of old logprobs and adds its metrics; earlier versions score the tokens they generated."""
        algo = self._spec.algo
        with rollout.timed("old_logprobs"):
            entropies = rollout.metrics if algo.use_rollout_entropy else None
            old_logprobs = self.policy.compute_old_logprobs(rollout, entropies=entropies)
        columns = replace(columns, has_entropy=algo.use_rollout_entropy)
        if algo.use_rollout_logprobs:  # the pass was for the entropy only
            return columns
        if self._snapshots is not None:
            with rollout.timed("old_logprobs"):
                old_logprobs = self._snapshots.score(rollout, old_logprobs)
        columns = replace(columns, old_logprobs=old_logprobs)
        if self._context.computes_loss:
            for micro in rollout.all_micros:
                logprobs = take_microbatch(old_logprobs, micro)
                assert logprobs is not None, "computed above"
                add_logprob_diff(rollout, columns, micro, logprobs=logprobs)
                rollout.logprob_collector.add(micro, logprobs)
        return columns

    def _add_advantages(self, rollout: PackedRollout, columns: TrainColumns) -> TrainColumns:
        """Adds advantages, returns and the scale of the weights: all that is known before the first step."""
        algo = self._spec.algo
        if not compares_policies(algo):
            return columns
        # In this order: the user's function sees the advantages, and the weights use the columns that it returns.
        columns = compute_advantages(rollout, columns, self._spec, device=self._device)
        columns = apply_user_postprocess(rollout, columns, self._spec)
        if self._trains_policy:
            factor = mean_weight_factor(rollout, columns, algo, device=self._device)
            columns = replace(columns, mean_weight_factor=factor)
        return columns

    def _optimize(self, rollout: PackedRollout, columns: TrainColumns) -> TrainResult:
        if self._context.computes_loss:
            add_column_means(rollout, columns)
        order = order_steps(len(rollout.steps), self._spec, rollout_id=rollout.batch.rollout_id)
        results: list[dict[str, float]] = [{} for _ in order]
        if self._trains_policy:
            with self._offloader.resident("policy", "policy.optimizer"), rollout.timed("optimize"):
                # Before the first step changes the weights, which are still those of the batch's version.
                if self._snapshots is not None:
                    self._snapshots.keep(version=rollout.batch.version)
                for each, result in zip(order, results, strict=True):
                    result |= self.policy.train_step(rollout, each.select(columns), step=each.step)
        if self.critic is not None:
            with self._offloader.resident("critic", "critic.optimizer"), rollout.timed("optimize_critic"):
                for each, result in zip(order, results, strict=True):
                    result |= self.critic.train_step(rollout, columns, step=each.step)
        # Counted before: the interval is in finished rollouts.
        self._num_rollouts += 1
        self._update_reference()
        if columns.teacher is not None:
            columns.teacher.release()
        metrics = self._context.gather_metrics(rollout)
        if self._spec.engine_shapes is not None:
            check_equal_logprobs(metrics, rank=dist.get_rank(), num_rollouts=self._num_rollouts - 1)
        logprobs = self._context.gather_logprobs(rollout)
        return TrainResult(
            steps=results,
            metrics=metrics,
            seconds=rollout.seconds,
            logprobs=logprobs,
            columns=self._context.gather_columns(rollout, columns),
            num_epochs=self._spec.algo.ppo_epochs,
        )

    def _update_reference(self) -> None:
        """Copies the policy into the reference after every `algo.ref_update_interval` rollouts."""
        interval = self._spec.algo.ref_update_interval
        if self.reference is not None and interval is not None and self._num_rollouts % interval == 0:
            with self._offloader.resident("policy", "reference"):
                self.reference.copy_policy()
                self._offloader.mark_dirty("reference")

    # -- weights and checkpoints

    @property
    def senders(self) -> tuple[int, ...]:
        """See TrainBackend."""
        return self._exporter.senders

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainBackend. In `train.dtype`, which is the dtype of the engines."""
        # The caller offloads when it has sent the last weight: a generator may never reach its end.
        with self._offloader.resident("policy"):
            yield from self._exporter.weights()

    def offload(self) -> None:
        """See TrainBackend."""
        self._offloader.offload_all()

    def exporting(self) -> AbstractContextManager[None]:
        """See TrainerRank."""
        return self._offloader.exportable()

    def save(self, folder: Path) -> None:
        """See TrainBackend."""
        progress = TrainerProgress(num_steps=self.policy.num_steps, num_rollouts=self._num_rollouts)
        with self._context.computing():
            with self._offloader.resident("policy", "policy.optimizer", "reference"):
                self._save_models(folder, progress)
                if self._snapshots is not None:
                    self._snapshots.save(folder)
            if self.critic is not None:
                with self._offloader.resident("critic", "critic.optimizer"):
                    self.critic.save(folder)
        self._offloader.offload_all()

    def finish_saving(self) -> None:
        """See TrainBackend."""
        self._context.finish_saving()

    def load(self, folder: Path) -> None:
        """See TrainBackend. Raises DataError where `folder` is no checkpoint of this model."""
        with self._context.computing():
            with self._offloader.resident("policy", "policy.optimizer", "reference"):
                progress = self._load_models(folder)
                # The host copy of a frozen reference is outdated by the load.
                self._offloader.mark_dirty("reference")
                if self._snapshots is not None:
                    self._snapshots.load(folder)
            self.policy.num_steps, self._num_rollouts = progress.num_steps, progress.num_rollouts
            if self.critic is not None:
                with self._offloader.resident("critic", "critic.optimizer"):
                    self.critic.load(folder)
        self._offloader.offload_all()

    def export_hf(self, folder: Path) -> None:
        """See TrainBackend. In `train.dtype`."""
        with self._context.computing(), self._offloader.resident("policy"):
            self._write_hf(folder)
        self._offloader.offload_all()

    def close(self) -> None:
        """Drops models and optimisers. The caller ends the process group."""
        del self.policy, self.reference, self.critic, self.teacher, self._snapshots, self._exporter
        self.adapters = None

    @abstractmethod
    def _save_models(self, folder: Path, progress: TrainerProgress) -> None:
        """Writes policy, optimiser, random states and a reference that is updated."""

    @abstractmethod
    def _load_models(self, folder: Path) -> TrainerProgress:
        """The inverse of `_save_models`."""

    @abstractmethod
    def _write_hf(self, folder: Path) -> None:
        """Writes the policy as a folder that transformers loads."""

    def _register_models(self) -> None:
        """Registers all models with the offloader and moves them off the device."""
        roles = {"policy": self.policy, "critic": self.critic, "reference": self.reference, "teacher": self.teacher}
        for name, role in roles.items():
            if role is not None:
                role.add_to(self._offloader, name=name)
        self._offloader.offload_all()
