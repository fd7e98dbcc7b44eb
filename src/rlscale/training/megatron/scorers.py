"""Reference and teacher: weights that take turns inside of the policy's model, or a model of another architecture."""

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
from rlscale.training.megatron.checkpoint.async_save import AsyncSaver
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights, save_weights
from rlscale.training.megatron.hf_mapping.load_hf import load_hf
from rlscale.training.megatron.hooks import call_before_logprobs
from rlscale.training.megatron.model.megatron_model import DTYPES, MegatronModel, build_model, configure_pipeline
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.policy import score_logprobs
from rlscale.training.megatron.policy_snapshots import HostWeights
from rlscale.training.offload import Offloader
from rlscale.training.roles import check_reference_update, check_teacher_vocabulary
from rlscale.training.rollout_state import PackedRollout
from rlscale.training.spec import ModelSource, TrainerSpec

FOLDER = "reference"
_NAMES = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"})
"""Entries of a config that say nothing of a model's shapes or of what it computes."""


class Scorer:
    """A model that is never trained. Where it has the policy's architecture, it is computed in the policy's chunks.

    Invariant: outside of its methods the policy's chunks hold their own weights.

    Args:
        source: where its weights come from.
        role: `reference` or `teacher`.
        policy: the policy's model, whose weights are loaded after this.
    """

    def __init__(
        self, spec: TrainerSpec, source: ModelSource, *, role: str, policy: MegatronModel, dims: ParallelDims
    ) -> None:
        self._spec, self._role, self._dims = spec, role, dims
        borrows = is_like(source.path, spec.model_path)
        self.model = policy if borrows else _own_model(spec, source.path, dims=dims)
        if source.checkpoint is None:
            load_hf(self.model, source.path)
        else:
            load_weights(source.checkpoint, model=self.model)
        self.weights = HostWeights(policy.chunks) if borrows else None
        self._head = OutputHead.from_model(self.model, spec, dims=dims)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """Its logprobs of the rollout; a collective. The temperature is the policy's, as the two are compared."""
        with self.in_place():
            call_before_logprobs(self._spec, self.model.chunks, role=self._role)
            return score_logprobs(self.model, rollout, dims=self._dims, head=self._head)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While `model` holds its weights."""
        if self.weights is None:
            yield
            return
        with self.weights.in_place_of(self.model.chunks):
            yield

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers the parameters, where the model is not the policy's; no collective."""
        if self.weights is None:
            offloader.add(name, lambda: (p for chunk in self.model.chunks for p in chunk.parameters()), is_frozen=True)


class MegatronReference:
    """The reference of the KL terms. With `algo.ref_update_interval` it follows the policy, and is saved."""

    def __init__(self, scorer: Scorer, *, interval: int | None) -> None:
        check_reference_update(interval, is_same_model=scorer.weights is not None)
        self.scorer, self._interval = scorer, interval

    @classmethod
    def from_spec(cls, spec: TrainerSpec, *, policy: MegatronModel, dims: ParallelDims) -> MegatronReference | None:
        """None where the loss needs none. Raises ConfigError for one that cannot follow the policy as it should."""
        if spec.ref_path is None or not uses_reference(spec.algo):
            return None
        source = ModelSource(path=spec.ref_path, checkpoint=spec.ref_checkpoint)
        scorer = Scorer(spec, source, role="reference", policy=policy, dims=dims)
        return cls(scorer, interval=spec.algo.ref_update_interval)

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole."""
        self.scorer.add_to(offloader, name=name)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole. [T]"""
        return self.scorer.compute_logprobs(rollout)

    def copy_policy(self) -> None:
        """See ReferenceRole."""
        assert self.scorer.weights is not None, "one that follows has the policy's shapes"
        self.scorer.weights.take(self.scorer.model.chunks)

    def save(self, folder: Path, *, async_saver: AsyncSaver | None) -> None:
        """Writes it into a checkpoint where it changes; a collective. `async_saver` as of `save_state`."""
        if self._interval is None:
            return
        with self.scorer.in_place():
            save_weights(folder / FOLDER, model=self.scorer.model, async_saver=async_saver)

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        if self._interval is None:
            return
        assert self.scorer.weights is not None, "one that follows has the policy's shapes"
        with self.scorer.in_place():
            load_weights(folder / FOLDER, model=self.scorer.model)
            self.scorer.weights.take(self.scorer.model.chunks)


class MegatronTeacher:
    """The teacher of on-policy distillation, of any architecture that Megatron-core has, with the policy's tokens."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @classmethod
    def from_spec(cls, spec: TrainerSpec, *, policy: MegatronModel, dims: ParallelDims) -> MegatronTeacher | None:
        """None where the advantages need none. Raises ConfigError for a teacher that lacks tokens."""
        if spec.teacher is None or not uses_teacher(spec.algo):
            return None
        scorer = Scorer(spec, spec.teacher, role="teacher", policy=policy, dims=dims)
        known, needed = scorer.model.architecture.vocab_size, policy.architecture.vocab_size
        check_teacher_vocabulary(spec.teacher.path, num_tokens=known, num_needed=needed)
        return cls(scorer)

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole."""
        self.scorer.add_to(offloader, name=name)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole. [T]"""
        return self.scorer.compute_logprobs(rollout)


def is_like(path: str, other: str) -> bool:
    """Whether two Hugging Face folders or hub ids are of one architecture in every figure."""
    return path == other or _figures(path) == _figures(other)


def own_model_config(megatron: MegatronConfig) -> MegatronConfig:
    """The same sizes, for a model whose architecture its own config.json says."""
    given = {name: value for name, value in megatron.core_args.items() if name not in MEGATRON_DEFAULTS}
    return replace(megatron, core_args=given, rope_type=RopeType.rope, max_position_embeddings=None)


def _own_model(spec: TrainerSpec, path: str, *, dims: ParallelDims) -> MegatronModel:
    config = ModelConfig(use_hf_config_for_megatron=True)
    megatron, dtype = own_model_config(spec.megatron), DTYPES[spec.train.dtype]
    return configure_pipeline(build_model(path, model=config, megatron=megatron, dtype=dtype), dims)


def _figures(path: str) -> dict[str, Any]:
    return {name: value for name, value in AutoConfig.from_pretrained(path).to_dict().items() if name not in _NAMES}
