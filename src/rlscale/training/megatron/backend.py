"""MegatronBackend: one trainer rank on Megatron-core.

Columns and metrics that the last stage of the pipeline computes are sent to the others, so that every rank knows and
returns the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from rlscale.training.backend import RoleBackend
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights
from rlscale.training.megatron.critic import MegatronCritic
from rlscale.training.megatron.export import write_hf
from rlscale.training.megatron.hf_mapping.export_hf import make_exporter
from rlscale.training.megatron.hf_mapping.load_hf import load_hf
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.megatron_model import DTYPES, build_model, configure_pipeline
from rlscale.training.megatron.policy import MegatronPolicy, PolicyCopies
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.scorers import MegatronReference, MegatronTeacher
from rlscale.training.policy_snapshots import OldPolicies
from rlscale.training.rollout_state import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import Position
from rlscale.types import Float32, StepPlan, TrainBatch


class MegatronBackend(RoleBackend):
    """Trains a model that is divided over all ranks of the default process group as `megatron.*` says.

    Invariants: those of `RoleBackend`; there is one of it at a time in a process.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = MegatronBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    policy: MegatronPolicy
    critic: MegatronCritic | None
    reference: MegatronReference | None
    teacher: MegatronTeacher | None

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        self._rank = MegatronRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(spec, device=self._rank.device, turns=self._rank.turns)
        dims, dtype = self._rank.dims, DTYPES[spec.train.dtype]
        with self._computing():
            model = build_model(
                spec.model_path, model=spec.model, megatron=spec.megatron, dtype=dtype, custom=spec.custom
            )
            configure_pipeline(model, dims)
            # These may have the model hold their weights for a moment.
            self.reference = MegatronReference.of(spec, policy=model, dims=dims)
            self.teacher = MegatronTeacher.of(spec, policy=model, dims=dims)
            if spec.start_weights is None:
                load_hf(model, spec.model_path)
            else:
                load_weights(spec.start_weights, model=model)
            self.policy = MegatronPolicy(model, on=self._rank)
            copies = PolicyCopies(self.policy, on=self._rank)
            self._old_policies = OldPolicies(copies, limit=spec.num_old_policies) if spec.num_old_policies else None
            is_here = spec.critic is not None and spec.critic.own_ranks is None
            self.critic = MegatronCritic(spec.critic, on=self._rank) if spec.critic and is_here else None
            self._exporter = make_exporter(model, to=spec.recipients)
        self._take_part()
        self._turns.rest()

    @property
    def senders(self) -> tuple[int, ...]:
        """See TrainBackend."""
        return self._exporter.senders

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainBackend. In `train.dtype`, as engines hold them."""
        with self._turns.of("policy"):
            yield from self._exporter.weights()

    def save(self, folder: Path) -> None:
        """See TrainBackend."""
        position = Position(num_steps=self.policy.num_steps, num_rollouts=self._num_rollouts)
        with self._computing():
            with self._turns.of("policy", "policy.optimizer"):
                self.policy.trained.save(folder, position=position)
                if self.reference is not None:
                    self.reference.save(folder, async_saver=self._rank.async_saver)
                if self._old_policies is not None:
                    self._old_policies.save(folder)
            if self.critic is not None:
                with self._turns.of("critic", "critic.optimizer"):
                    self.critic.save(folder)
        self._turns.rest()

    def finish_saving(self) -> None:
        """See TrainBackend."""
        self._rank.finish_saving()

    def load(self, folder: Path) -> None:
        """See TrainBackend. Raises DataError for a folder that is no checkpoint of this model."""
        with self._computing():
            with self._turns.of("policy", "policy.optimizer"):
                position = self.policy.trained.load(folder)
                if self.reference is not None:
                    self.reference.load(folder)
                if self._old_policies is not None:
                    self._old_policies.load(folder)
            self.policy.num_steps, self._num_rollouts = position.num_steps, position.num_rollouts
            if self.critic is not None:
                with self._turns.of("critic", "critic.optimizer"):
                    self.critic.load(folder)
        self._turns.rest()

    def export_hf(self, folder: Path) -> None:
        """See TrainBackend. In `train.dtype`."""
        dtype = DTYPES[self._spec.train.dtype]
        with self._computing(), self._turns.of("policy"):
            write_hf(self.policy.model, folder, source=self._spec.model_path, dtype=dtype)
        self._turns.rest()

    def close(self) -> None:
        """Drops models and optimiser. The process group belongs to who made it."""
        del self.policy, self.reference, self.critic, self.teacher, self._exporter, self._old_policies

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with megatron_device():
            yield

    def _take_part(self) -> None:
        """Names to those who take turns what each role has on the device."""
        self.policy.trained.take_part(self._turns, name="policy")
        if self.critic is not None:
            self.critic.trained.take_part(self._turns, name="critic")
        for name, role in {"reference": self.reference, "teacher": self.teacher}.items():
            if role is not None:
                role.scorer.take_part(self._turns, name=name)

    def _packed(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        return self._rank.rollout(batch, steps)

    def _pack_for_scoring(self, rollout: Rollout, steps: Sequence[StepPlan]) -> None:
        self._rank.pack_for_scoring(rollout, steps)

    def _metrics(self, rollout: Rollout) -> dict[str, float]:
        metrics, _ = rollout.metrics.gather()
        return self._rank.dims.broadcast_from_last_stage(metrics)

    def _asked(self, rollout: Rollout) -> dict[int, Float32]:
        return self._rank.dims.broadcast_from_last_stage(
            rollout.logprob_collector.gather(self._device, group=rollout.data_group)
        )
