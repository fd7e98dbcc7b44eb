"""FsdpBackend: one trainer rank on FSDP2. Which models take part is in `roles`, one module each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.training.backend import RoleBackend
from rlscale.training.batch_invariant.equal_logprobs import require_equal_logprobs
from rlscale.training.fsdp.checkpoint import load_state, save_state
from rlscale.training.fsdp.critic import Critic
from rlscale.training.fsdp.export import export_hf, published_weights
from rlscale.training.fsdp.model import DTYPES
from rlscale.training.fsdp.policy import Policy
from rlscale.training.fsdp.policy_snapshots import PolicyShards
from rlscale.training.fsdp.rank import Rank
from rlscale.training.fsdp.scorers import Reference
from rlscale.training.fsdp.teacher import Teacher
from rlscale.training.offload import state_tensors
from rlscale.training.packing.microbatch import padding
from rlscale.training.policy_snapshots import OldPolicies
from rlscale.training.rollout_state import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import Position
from rlscale.types import Float32, StepPlan, TrainBatch


class FsdpBackend(RoleBackend):
    """Trains a Hugging Face model that is sharded over all ranks of the default process group.

    Invariants: those of `RoleBackend`; the bits depend on the number of ranks only; between calls no parameter is
    gathered.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = FsdpBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    policy: Policy
    critic: Critic | None
    reference: Reference | None
    teacher: Teacher | None

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        self._rank = Rank.join(spec, rank=rank, world_size=world_size)
        super().__init__(spec, device=self._rank.device, turns=self._rank.turns)
        mesh = self._rank.mesh
        self.policy = Policy(spec, mesh=mesh, device=self._device)
        weights = PolicyShards(self.policy.model, temperature=spec.temperature)
        self._old_policies = OldPolicies(weights, limit=spec.num_old_policies) if spec.num_old_policies else None
        self.reference = Reference.of(spec, mesh=mesh, policy=self.policy.model)
        is_here = spec.critic is not None and spec.critic.own_ranks is None
        self.critic = Critic(spec, spec.critic, mesh=mesh, device=self._device) if spec.critic and is_here else None
        self.teacher = Teacher.of(spec, mesh=mesh, policy=self.policy.model)
        self._take_part()
        self._turns.rest()

    senders = (0,)  # see TrainBackend; every weight comes on every rank

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainBackend. In `train.dtype`, as engines hold them."""
        with self._turns.of("policy"):
            yield from published_weights(self.policy.model, dtype=DTYPES[self._spec.train.dtype])

    def save(self, folder: Path) -> None:
        """See TrainBackend."""
        with self._turns.of("policy", "policy.optimizer", "reference"):
            save_state(
                folder,
                model=self.policy.model,
                optimizer=self.policy.optimizer,
                reference=self._moving_reference,
                position=Position(num_steps=self.policy.num_steps, num_rollouts=self._num_rollouts),
            )
            if self._old_policies is not None:
                self._old_policies.save(folder)
        if self.critic is not None:
            with self._turns.of("critic", "critic.optimizer"):
                self.critic.save(folder)
        self._turns.rest()

    def finish_saving(self) -> None:
        """See TrainBackend. `save` leaves nothing to be written."""

    def load(self, folder: Path) -> None:
        """See TrainBackend. Raises DataError for a folder that is no checkpoint of this model."""
        policy, reference = self.policy, self._moving_reference
        with self._turns.of("policy", "policy.optimizer", "reference"):
            position = load_state(folder, model=policy.model, optimizer=policy.optimizer, reference=reference)
            self._turns.changed("reference")
            if self._old_policies is not None:
                self._old_policies.load(folder)
        policy.num_steps, self._num_rollouts = position.num_steps, position.num_rollouts
        if self.critic is not None:
            with self._turns.of("critic", "critic.optimizer"):
                self.critic.load(folder)
        self._turns.rest()

    def export_hf(self, folder: Path) -> None:
        """See TrainBackend. In `train.dtype`."""
        dtype = DTYPES[self._spec.train.dtype]
        with self._turns.of("policy"):
            export_hf(self.policy.model, folder, source=self._spec.model_path, dtype=dtype)
        self._turns.rest()

    def close(self) -> None:
        """Drops models and optimiser. The process group belongs to who made it."""
        del self.policy, self.reference, self.critic, self.teacher

    def _take_part(self) -> None:
        """Names to those who take turns what each role has on the device."""
        for name, trained in {"policy": self.policy, "critic": self.critic}.items():
            if trained is not None:
                self._turns.add(name, trained.model.parameters)
                self._turns.add(f"{name}.optimizer", partial(state_tensors, trained.optimizer))
        for name, scorer in {"reference": self.reference, "teacher": self.teacher}.items():
            if scorer is not None:
                self._turns.add(name, scorer.model.parameters, is_frozen=True)

    @property
    def _moving_reference(self) -> PreTrainedModel | None:
        return None if self.reference is None else self.reference.state

    @property
    def _kernel(self) -> str:
        kernel: str = self.policy.model.config._attn_implementation
        return kernel

    def _packed(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        rollout = self._rank.rollout(batch, steps, kernel=self._kernel)
        rollout.metrics.add(padding(rollout.flat), prefix="rollout/")
        return rollout

    def _pack_for_scoring(self, rollout: Rollout, steps: Sequence[StepPlan]) -> None:
        self._rank.pack_for_scoring(rollout, steps, kernel=self._kernel)

    def _metrics(self, rollout: Rollout) -> dict[str, float]:
        metrics, _ = rollout.metrics.gather()
        if self._spec.engine_shapes is not None:
            require_equal_logprobs(metrics, rank=dist.get_rank(), num_rollouts=self._num_rollouts - 1)
        return metrics

    def _asked(self, rollout: Rollout) -> dict[int, Float32]:
        return rollout.logprob_collector.gather(self._device, group=rollout.data_group)
