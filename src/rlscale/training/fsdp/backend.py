"""One trainer rank on FSDP2."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from rlscale.config import LoraSync
from rlscale.training.backend import RoleBackend
from rlscale.training.fsdp.adapters import FsdpAdapters
from rlscale.training.fsdp.checkpoint import load_state, save_state
from rlscale.training.fsdp.critic import FsdpCritic
from rlscale.training.fsdp.export import ShardedExporter, export_hf
from rlscale.training.fsdp.model import DTYPES
from rlscale.training.fsdp.policy import FsdpPolicy
from rlscale.training.fsdp.policy_snapshots import ShardSnapshots
from rlscale.training.fsdp.rank import FsdpRank
from rlscale.training.fsdp.scorers import BaseReference, FsdpReference, FsdpTeacher
from rlscale.training.policy_snapshots import PolicySnapshots
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import TrainerProgress


class FsdpBackend(RoleBackend):
    """Trains a Hugging Face model that is sharded over all ranks of the default process group.

    Invariants: those of `RoleBackend`; between calls no parameter is gathered.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = FsdpBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    policy: FsdpPolicy
    critic: FsdpCritic | None
    reference: FsdpReference | BaseReference | None
    teacher: FsdpTeacher | None

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        self.rank = FsdpRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(spec, self.rank)
        mesh = self.rank.mesh
        self.policy = FsdpPolicy(self.rank)
        self._exporter = ShardedExporter(self.policy.model, dtype=DTYPES[spec.train.dtype], to=spec.weight_owners)
        if spec.train.lora.rank and spec.train.lora.sync == LoraSync.adapter:
            self.adapters = FsdpAdapters(
                self.policy.model,
                spec.train.lora,
                dtype=DTYPES[spec.train.dtype],
                exporter=self._exporter,
                offloader=self.rank.offloader,
            )
        source = ShardSnapshots(self.policy.model, score=self.policy.compute_snapshot_logprobs)
        self._snapshots = PolicySnapshots(source, limit=spec.num_old_policies) if spec.num_old_policies else None
        if spec.has_base_reference:
            self.reference = BaseReference(self.policy.model, temperature=spec.temperature)
            self._reference_model = "policy"
        else:
            self.reference = FsdpReference.from_spec(spec, mesh=mesh, policy=self.policy.model)
        is_here = spec.critic is not None and spec.critic.dedicated_ranks is None
        self.critic = FsdpCritic(spec, spec.critic, rank=self.rank) if spec.critic and is_here else None
        self.teacher = FsdpTeacher.from_spec(spec, mesh=mesh, policy=self.policy.model)
        self._register_models()

    def _save_models(self, folder: Path, progress: TrainerProgress) -> None:
        save_state(
            folder,
            model=self.policy.model,
            optimizer=self.policy.optimizer,
            reference=self._saved_reference,
            progress=progress,
        )

    def _load_models(self, folder: Path) -> TrainerProgress:
        policy = self.policy
        return load_state(folder, model=policy.model, optimizer=policy.optimizer, reference=self._saved_reference)

    def _write_hf(self, folder: Path) -> None:
        dtype = DTYPES[self._spec.train.dtype]
        export_hf(self.policy.model, folder, source=self._spec.model_path, dtype=dtype)

    @property
    def _saved_reference(self) -> PreTrainedModel | None:
        """The reference where it is part of a checkpoint: with `algo.ref_update_interval` it changes."""
        is_updated = self.reference is not None and self._spec.algo.ref_update_interval is not None
        return self.reference.model if self.reference is not None and is_updated else None
