"""Interfaces of the models of a trainer rank, and of the rank itself, whichever backend implements them.

Every method is a collective of all ranks of the default process group, unless its docstring excludes it.

Shape legend: T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlscale.errors import ConfigError, Problem
from rlscale.protocols import TrainBackend
from rlscale.training.loss.teacher_targets import TeacherTargets
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.rollout_state import PackedRollout, TrainColumns
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class RankContext(Protocol):
    """Device, process groups and packing of one rank; knows no model."""

    @property
    def spec(self) -> TrainerSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def offloader(self) -> Offloader: ...

    @property
    def computes_loss(self) -> bool:
        """True on the ranks that have logits: all but the earlier stages of a pipeline."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Context around everything that computes with models or communicates."""
        ...

    def pack_rollout(self, batch: TrainBatch, steps: Sequence[StepPlan], *, with_scoring: bool) -> PackedRollout:
        """Packs this rank's micro-batches; no collective.

        `with_scoring` also packs the separate micro-batches of passes without gradient, where the plans have them.
        """
        ...

    def gather_metrics(self, rollout: PackedRollout) -> dict[str, float]:
        """Metrics of the rollout over all ranks, on all ranks."""
        ...

    def gather_logprobs(self, rollout: PackedRollout) -> dict[int, Float32]:
        """Requested logprobs of the rollout by sample, on all ranks."""
        ...

    def gather_columns(self, rollout: PackedRollout, columns: TrainColumns) -> dict[str, Float32]:
        """Columns of all samples, on all ranks, if the batch requests them. [T]"""
        ...

    def finish_saving(self) -> None:
        """See TrainBackend."""
        ...


class ModelRole(Protocol):
    """A model that shares the device with others."""

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers the tensors of the model, and of its optimiser as `<name>.optimizer`; no collective."""
        ...


class ScoringRole(ModelRole, Protocol):
    """A model that only scores."""

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """Logprobs of this rank's samples as a column. [T]"""
        ...


class TeacherRole(ModelRole, Protocol):
    """The teacher of on-policy distillation."""

    def compute_targets(self, rollout: PackedRollout) -> tuple[Tensor, TeacherTargets | None]:
        """Logprobs of this rank's samples as a column [T], and what a divergence over tokens reads, if there is one."""
        ...


class ReferenceRole(ScoringRole, Protocol):
    """The reference model. With `algo.ref_update_interval` it is updated and part of the checkpoint."""

    def copy_policy(self) -> None:
        """Copies the weights of the policy into the reference."""
        ...


class PolicyRole(ModelRole, Protocol):
    """The model that is trained on rollouts and sent to the engines."""

    num_steps: int

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """Logprobs of this rank's samples as a column. [T]"""
        ...

    def compute_old_logprobs(self, rollout: PackedRollout, *, entropies: MetricSums | None) -> Tensor:
        """`compute_logprobs` before the first optimiser step of the rollout. [T]

        `entropies` gets the metric `rollout/entropy`; None: the entropy is not computed.
        """
        ...

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """Makes one optimiser step, `rollout.steps[step]`, and returns its metrics, the same on every rank.

        Raises WorkerError, before any weight changes, for a loss or gradient that is not finite.
        """
        ...


class CriticRole(ModelRole, Protocol):
    """The value model of ppo."""

    num_steps: int

    def compute_values(self, rollout: PackedRollout) -> Tensor:
        """Values of all samples, the same column on every rank. [T]"""
        ...

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """Makes one optimiser step and returns its metrics as `critic_<name>`. Raises as `PolicyRole.train_step`."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the critic's part of the checkpoint in `folder`, or next to it with `critic.save`."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse of `save`. A checkpoint of a run without a critic leaves the critic as it is.

        Raises DataError where another critic is saved, or none in `critic.save`.
        """
        ...


class WeightExporter(Protocol):
    """The policy's weights under their Hugging Face names, for the engines."""

    @property
    def senders(self) -> tuple[int, ...]:
        """Ranks that yield weights."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank sends; a collective of all ranks."""


class AdapterExporter(Protocol):
    """The policy's adapters alone, for engines that hold the base."""

    config: Mapping[str, Any]
    """Rank, alpha and layers, by peft's keys."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """A and B of every layer in full, under peft's names; a collective of all ranks."""

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank sends, without the adapters; a collective of all ranks."""


class TrainerRank(TrainBackend, Protocol):
    """One trainer rank, as a worker process uses it."""

    @property
    def adapters(self) -> AdapterExporter | None:
        """None where the engines get whole weights."""
        ...

    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None: ...

    def compute_advantages(self, values: Float32) -> Float32: ...

    def optimize(self) -> TrainResult: ...

    def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float: ...

    def exporting(self) -> AbstractContextManager[None]:
        """Context around sending weights: engines may open the device memory that is allocated in it."""
        ...


def check_reference_update(interval: int | None, *, is_same_model: bool) -> None:
    """Raises ConfigError for `algo.ref_update_interval` with a reference of another architecture than the policy."""
    if interval is not None and not is_same_model:
        rule = "be null with a reference model whose shape differs from the policy"
        fix = "set model.ref_load to a checkpoint of the same model"
        raise ConfigError([Problem(path="algo.ref_update_interval", rule=rule, value=str(interval), fix=fix)])


def check_teacher_vocabulary(path: str, *, num_tokens: int, num_needed: int) -> None:
    """Raises ConfigError for a teacher at `path` whose vocabulary is smaller than the policy's."""
    if num_tokens < num_needed:
        rule, value = f"name a model with at least the {num_needed} tokens of the policy", f"{path} with {num_tokens}"
        fix = "use a teacher of the same model family, which has the same token ids"
        raise ConfigError([Problem(path="model.teacher_load", rule=rule, value=value, fix=fix)])
