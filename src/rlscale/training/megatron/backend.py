"""One trainer rank on Megatron-core.

The last stage of the pipeline computes columns and metrics; it broadcasts them, so that every rank returns the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rlscale.training.backend import RoleBackend
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights
from rlscale.training.megatron.critic import MegatronCritic
from rlscale.training.megatron.export import write_hf
from rlscale.training.megatron.hf_mapping.export_hf import make_exporter
from rlscale.training.megatron.hf_mapping.load_hf import load_hf
from rlscale.training.megatron.model.megatron_model import DTYPES, build_model, configure_pipeline
from rlscale.training.megatron.policy import MegatronPolicy, PolicyCopies
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.scorers import MegatronReference, MegatronTeacher
from rlscale.training.policy_snapshots import PolicySnapshots
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import TrainerProgress


class MegatronBackend(RoleBackend):
    """Trains a model that is divided over all ranks of the default process group as `megatron.*` configures.

    Invariants: those of `RoleBackend`; a process has at most one of it at a time.

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
        self.rank = MegatronRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(spec, self.rank)
        dims, dtype = self.rank.dims, DTYPES[spec.train.dtype]
        with self.rank.computing():
            model = build_model(
                spec.model_path, model=spec.model, megatron=spec.megatron, dtype=dtype, custom=spec.custom
            )
            configure_pipeline(model, dims)
            # Before the policy's weights are loaded: these may load their own into the same model for a while.
            self.reference = MegatronReference.from_spec(spec, policy=model, dims=dims)
            self.teacher = MegatronTeacher.from_spec(spec, policy=model, dims=dims)
            if spec.start_weights is None:
                load_hf(model, spec.model_path)
            else:
                load_weights(spec.start_weights, model=model)
            self.policy = MegatronPolicy(model, on=self.rank)
            copies = PolicyCopies(self.policy, on=self.rank)
            self._snapshots = PolicySnapshots(copies, limit=spec.num_old_policies) if spec.num_old_policies else None
            is_here = spec.critic is not None and spec.critic.dedicated_ranks is None
            self.critic = MegatronCritic(spec.critic, on=self.rank) if spec.critic and is_here else None
            self._exporter = make_exporter(model, to=spec.weight_owners)
        self._register_models()

    @property
    def senders(self) -> tuple[int, ...]:
        """See TrainBackend."""
        return self._exporter.senders

    def close(self) -> None:
        """See RoleBackend."""
        del self._exporter
        super().close()

    def _published_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._exporter.weights()

    def _save_models(self, folder: Path, progress: TrainerProgress) -> None:
        self.policy.trained.save(folder, progress=progress)
        if self.reference is not None:
            self.reference.save(folder, async_saver=self.rank.async_saver)

    def _load_models(self, folder: Path) -> TrainerProgress:
        progress = self.policy.trained.load(folder)
        if self.reference is not None:
            self.reference.load(folder)
        return progress

    def _write_hf(self, folder: Path) -> None:
        dtype = DTYPES[self._spec.train.dtype]
        write_hf(self.policy.model, folder, source=self._spec.model_path, dtype=dtype)
