"""Reference and teacher: weights that are loaded into the policy's model, or separate models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from rlscale.architectures.megatron_fields import MEGATRON_DEFAULTS
from rlscale.config import MegatronConfig, ModelConfig, uses_reference, uses_teacher
from rlscale.config.groups.megatron import RopeType
from rlscale.training.loss.teacher_targets import TargetOptions, TeacherTargets
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights, save_weights
from rlscale.training.megatron.hf_mapping.load_hf import load_hf
from rlscale.training.megatron.hooks import call_before_logprobs
from rlscale.training.megatron.model.adapted_layers import adapters_off
from rlscale.training.megatron.model.megatron_model import DTYPES, MegatronModel, build_model, configure_pipeline
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.policy import MegatronPolicy
from rlscale.training.megatron.policy_snapshots import HostWeights
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.step import score_logprobs
from rlscale.training.megatron.teacher import VocabRows, score_targets
from rlscale.training.offload import Offloader
from rlscale.training.roles import check_reference_update, check_teacher_vocabulary
from rlscale.training.rollout_state import PackedRollout
from rlscale.training.spec import ModelSource, TrainerSpec

FOLDER = "reference"
_NAMES = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"})
"""Entries of a config.json that affect neither the shapes of a model nor what it computes."""


class FrozenModel:
    """A model that is never trained. With the policy's architecture it is computed in the policy's chunks.

    Invariant: outside of its methods the policy's chunks hold their own weights.

    Args:
        source: of its weights.
        role: `reference` or `teacher`.
        policy: the policy's model. Its weights must be loaded after this call, which may overwrite them.
        rank: of the trainer.
    """

    def __init__(self, source: ModelSource, *, role: str, policy: MegatronModel, rank: MegatronRank) -> None:
        spec = rank.spec
        self._spec, self._role, self._dims = spec, role, rank.dims
        shares_chunks = is_same_architecture(source.path, spec.model_path)
        self.model = policy if shares_chunks else _build_separate_model(spec, source.path, dims=rank.dims)
        if source.checkpoint is None:
            load_hf(self.model, source.path)
        else:
            load_weights(source.checkpoint, model=self.model)
        self.weights = HostWeights(policy.chunks) if shares_chunks else None
        self._head = OutputHead.from_model(self.model, spec, dims=rank.dims)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole; on every stage. The temperature is the policy's: the logprobs of both are compared."""
        with self.loaded():
            call_before_logprobs(self._spec, self.model.chunks, role=self._role)
            return score_logprobs(self.model, rollout, dims=self._dims, head=self._head)

    def compute_targets(
        self, rollout: PackedRollout, *, options: TargetOptions, policy_rows: VocabRows
    ) -> tuple[Tensor, TeacherTargets | None]:
        """`compute_logprobs`, with what a divergence over tokens reads; see `score_targets`."""
        with self.loaded():
            call_before_logprobs(self._spec, self.model.chunks, role=self._role)
            return score_targets(
                self.model, rollout, dims=self._dims, head=self._head, options=options, policy_rows=policy_rows
            )

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Context in which `model` holds the weights of this role."""
        if self.weights is None:
            yield
            return
        with self.weights.loaded_into(self.model.chunks), adapters_off(self.model.chunks):
            yield

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole. A model in the policy's chunks keeps nothing on the device between its passes."""
        if self.weights is None:
            offloader.add(name, lambda: (p for chunk in self.model.chunks for p in chunk.parameters()), is_frozen=True)


class MegatronReference:
    """The reference of the KL terms. With `algo.ref_update_interval` it is updated and saved."""

    def __init__(self, frozen: FrozenModel, *, interval: int | None) -> None:
        check_reference_update(interval, is_same_model=frozen.weights is not None)
        self.frozen, self._interval = frozen, interval

    @classmethod
    def from_spec(cls, *, policy: MegatronModel, rank: MegatronRank) -> MegatronReference | None:
        """None where the loss needs no reference. Raises ConfigError for one that cannot be updated as configured."""
        spec = rank.spec
        if spec.ref_path is None or not uses_reference(spec.algo):
            return None
        source = ModelSource(path=spec.ref_path, checkpoint=spec.ref_checkpoint)
        return cls(
            FrozenModel(source, role="reference", policy=policy, rank=rank), interval=spec.algo.ref_update_interval
        )

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole."""
        self.frozen.add_to(offloader, name=name)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole."""
        return self.frozen.compute_logprobs(rollout)

    def copy_policy(self) -> None:
        """See ReferenceRole."""
        assert self.frozen.weights is not None, "a reference that is updated has the policy's shapes"
        self.frozen.weights.copy_from(self.frozen.model.chunks)

    def save(self, folder: Path, *, rank: MegatronRank) -> None:
        """Writes the reference into a checkpoint if it is updated; a collective."""
        if self._interval is None:
            return
        with self.frozen.loaded():
            save_weights(folder / FOLDER, model=self.frozen.model, async_saver=rank.async_saver)

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        if self._interval is None:
            return
        assert self.frozen.weights is not None, "a reference that is updated has the policy's shapes"
        with self.frozen.loaded():
            load_weights(folder / FOLDER, model=self.frozen.model)
            self.frozen.weights.copy_from(self.frozen.model.chunks)


class MegatronBaseReference:
    """The policy without its adapters; see `ReferenceRole`. Its weights are the policy's."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers nothing: the parameters are the policy's."""

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole. [T]"""
        return self._policy.compute_base_logprobs(rollout)

    def copy_policy(self) -> None:
        """Never called: a config rule excludes `algo.ref_update_interval` with adapters."""
        raise AssertionError("the base of adapters does not change")


class MegatronTeacher:
    """The teacher of on-policy distillation: any architecture that Megatron-core supports, with the policy's tokens."""

    def __init__(self, frozen: FrozenModel, *, options: TargetOptions | None, policy_rows: VocabRows) -> None:
        self.frozen, self._options, self._policy_rows = frozen, options, policy_rows

    @classmethod
    def from_spec(cls, *, policy: MegatronModel, rank: MegatronRank) -> MegatronTeacher | None:
        """None where the advantages need no teacher. Raises ConfigError for one with a smaller vocabulary."""
        spec = rank.spec
        if spec.teacher is None or not uses_teacher(spec.algo):
            return None
        frozen = FrozenModel(spec.teacher, role="teacher", policy=policy, rank=rank)
        num_tokens, num_needed = frozen.model.architecture.vocab_size, policy.architecture.vocab_size
        check_teacher_vocabulary(spec.teacher.path, num_tokens=num_tokens, num_needed=num_needed)
        options = TargetOptions.from_algo(spec.algo, num_tokens=num_needed)
        return cls(frozen, options=options, policy_rows=VocabRows.from_model(policy, rank.dims))

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole."""
        self.frozen.add_to(offloader, name=name)

    def compute_targets(self, rollout: PackedRollout) -> tuple[Tensor, TeacherTargets | None]:
        """See TeacherRole."""
        if self._options is None:
            return self.frozen.compute_logprobs(rollout), None
        return self.frozen.compute_targets(rollout, options=self._options, policy_rows=self._policy_rows)


def is_same_architecture(path: str, other: str) -> bool:
    """Whether the configs of two Hugging Face folders or hub ids agree in everything that affects the model."""
    return path == other or _read_hf_fields(path) == _read_hf_fields(other)


def separate_model_config(megatron: MegatronConfig) -> MegatronConfig:
    """The same parallel sizes for a model that takes its architecture from its own config.json."""
    own = {*MEGATRON_DEFAULTS, "mtp_num_layers"}
    core_args = {name: value for name, value in megatron.core_args.items() if name not in own}
    return replace(
        megatron, core_args=core_args, enable_mtp_training=False, rope_type=RopeType.rope, max_position_embeddings=None
    )


def _build_separate_model(spec: TrainerSpec, path: str, *, dims: ParallelDims) -> MegatronModel:
    config = ModelConfig(use_hf_config_for_megatron=True)
    megatron, dtype = separate_model_config(spec.megatron), DTYPES[spec.train.dtype]
    return configure_pipeline(build_model(path, model=config, megatron=megatron, dtype=dtype), dims)


def _read_hf_fields(path: str) -> dict[str, Any]:
    return {name: value for name, value in AutoConfig.from_pretrained(path).to_dict().items() if name not in _NAMES}
