"""MegatronBackend: one trainer rank on Megatron-core.

The last pipeline stage computes columns and metrics and sends them to the others, so every rank returns the same.
"""

from __future__ import annotations

from pathlib import Path

from rlscale.config import LoraSync
from rlscale.training.backend import RoleBackend
from rlscale.training.megatron.adapters import MegatronAdapters, add_adapters
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights
from rlscale.training.megatron.critic import MegatronCritic
from rlscale.training.megatron.export import write_hf
from rlscale.training.megatron.hf_mapping.export_hf import Exporter, make_exporter
from rlscale.training.megatron.hf_mapping.load_hf import load_hf
from rlscale.training.megatron.model.megatron_model import DTYPES, MegatronModel, build_model, configure_pipeline
from rlscale.training.megatron.policy import MegatronPolicy
from rlscale.training.megatron.policy_snapshots import HostSnapshots
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.scorers import MegatronBaseReference, MegatronReference, MegatronTeacher
from rlscale.training.policy_snapshots import PolicySnapshots
from rlscale.training.spec import TrainerSpec
from rlscale.training.trainer_state import TrainerProgress


class MegatronBackend(RoleBackend):
    """Trains a model that is divided over all ranks of the default process group by the sizes of `megatron`.

    Invariants: those of `RoleBackend`; a process has at most one instance at a time.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = MegatronBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    policy: MegatronPolicy
    critic: MegatronCritic | None
    reference: MegatronReference | MegatronBaseReference | None
    teacher: MegatronTeacher | None

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        self.rank = MegatronRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(spec, self.rank)
        with self.rank.computing():
            self._build_roles()
            self._exporter = make_exporter(self.policy.model, to=spec.weight_owners)
            if spec.train.lora.rank and spec.train.lora.sync == LoraSync.adapter:
                assert isinstance(self._exporter, Exporter), "a config rule excludes mbridge with adapters"
                self.adapters = MegatronAdapters(
                    self.policy.model, exporter=self._exporter, offloader=self.rank.offloader
                )
        self._register_models()

    def _build_roles(self) -> None:
        spec, rank = self._spec, self.rank
        model = _build_policy_model(rank)
        # Reference and teacher load their weights into the policy's model first, so the policy's come last.
        self.reference = None if spec.has_base_reference else MegatronReference.from_spec(policy=model, rank=rank)
        self.teacher = MegatronTeacher.from_spec(policy=model, rank=rank)
        if spec.start_weights is None:
            load_hf(model, spec.model_path)
        else:
            load_weights(spec.start_weights, model=model)
        if spec.train.lora.rank:
            model = add_adapters(model, spec.model_path, spec.train.lora, seed=spec.train.seed)
        self.policy = MegatronPolicy(model, rank=rank)
        if spec.has_base_reference:
            self.reference = MegatronBaseReference(self.policy)
            self._reference_model = "policy"
        snapshots = HostSnapshots(self.policy, rank=rank)
        self._snapshots = PolicySnapshots(snapshots, limit=spec.num_old_policies) if spec.num_old_policies else None
        is_here = spec.critic is not None and spec.critic.dedicated_ranks is None
        self.critic = MegatronCritic(spec.critic, rank=rank) if spec.critic and is_here else None

    def _save_models(self, folder: Path, progress: TrainerProgress) -> None:
        self.policy.trainable.save(folder, progress=progress)
        if isinstance(self.reference, MegatronReference):
            self.reference.save(folder, rank=self.rank)

    def _load_models(self, folder: Path) -> TrainerProgress:
        progress = self.policy.trainable.load(folder)
        if isinstance(self.reference, MegatronReference):
            self.reference.load(folder)
        return progress

    def _write_hf(self, folder: Path) -> None:
        dtype = DTYPES[self._spec.train.dtype]
        write_hf(self.policy.model, folder, source=self._spec.model_path, dtype=dtype)


def _build_policy_model(rank: MegatronRank) -> MegatronModel:
    spec = rank.spec
    model = build_model(
        spec.model_path,
        model=spec.model,
        megatron=spec.megatron,
        dtype=DTYPES[spec.train.dtype],
        custom=spec.custom,
    )
    return configure_pipeline(model, rank.dims)
