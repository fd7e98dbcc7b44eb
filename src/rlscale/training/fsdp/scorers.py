"""Models on FSDP2 that only score: the reference of the KL terms, and the teacher of on-policy distillation."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rlscale.config import uses_reference, uses_teacher
from rlscale.errors import ConfigError, Problem
from rlscale.training.fsdp.checkpoint import load_weights
from rlscale.training.fsdp.model import copy_weights, has_shapes_of, load_sharded
from rlscale.training.fsdp.step import score_logprobs
from rlscale.training.fsdp.teacher import score_targets
from rlscale.training.loss.teacher_targets import TargetOptions, TeacherTargets
from rlscale.training.modules.logprob_head import has_product_logits
from rlscale.training.modules.lora import adapters_off
from rlscale.training.offload import Offloader
from rlscale.training.roles import check_reference_update, check_teacher_vocabulary
from rlscale.training.rollout_state import PackedRollout
from rlscale.training.spec import ModelSource, TrainerSpec


class _FsdpScorer:
    """A frozen model; see `ScoringRole`. It scores at the policy's temperature, as the two are compared."""

    def __init__(self, spec: TrainerSpec, source: ModelSource, *, mesh: DeviceMesh) -> None:
        self._temperature = spec.temperature
        self.model = load_sharded(source.path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=False)
        if source.checkpoint is not None:
            load_weights(source.checkpoint, model=self.model)

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers the parameters; no collective."""
        offloader.add(name, self.model.parameters, is_frozen=True)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole; a collective of all ranks. [T]"""
        return score_logprobs(self.model, rollout, temperature=self._temperature)


class FsdpReference(_FsdpScorer):
    """The reference model; see `ReferenceRole`."""

    def __init__(self, spec: TrainerSpec, source: ModelSource, *, mesh: DeviceMesh, policy: PreTrainedModel) -> None:
        super().__init__(spec, source, mesh=mesh)
        self._policy = policy
        check_reference_update(spec.algo.ref_update_interval, is_same_model=has_shapes_of(policy, self.model))

    @classmethod
    def from_spec(cls, spec: TrainerSpec, *, mesh: DeviceMesh, policy: PreTrainedModel) -> FsdpReference | None:
        """None where the loss needs no reference. Raises ConfigError for one that cannot be updated as configured."""
        if spec.ref_path is None or not uses_reference(spec.algo):
            return None
        source = ModelSource(path=spec.ref_path, checkpoint=spec.ref_checkpoint)
        return cls(spec, source, mesh=mesh, policy=policy)

    def copy_policy(self) -> None:
        """See ReferenceRole. Each rank copies its own shard."""
        copy_weights(self._policy, self.model)


class BaseReference:
    """The policy without its adapters; see `ReferenceRole`. Its weights are the policy's."""

    def __init__(self, policy: PreTrainedModel, *, temperature: float) -> None:
        self.model, self._temperature = policy, temperature

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers nothing: the parameters are the policy's."""

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See ScoringRole; a collective of all ranks. [T]"""
        with adapters_off(self.model):
            return score_logprobs(self.model, rollout, temperature=self._temperature)

    def copy_policy(self) -> None:
        """Never called: a config rule excludes `algo.ref_update_interval` with adapters."""
        raise AssertionError("the base of adapters does not change")


class FsdpTeacher(_FsdpScorer):
    """A model of any architecture with the policy's token ids; see `TeacherRole`. It never changes."""

    def __init__(self, spec: TrainerSpec, source: ModelSource, *, mesh: DeviceMesh, policy: PreTrainedModel) -> None:
        super().__init__(spec, source, mesh=mesh)
        # Models with images have the sizes of their decoder in `text_config`.
        num_tokens, num_needed = (each.config.get_text_config().vocab_size for each in (self.model, policy))
        check_teacher_vocabulary(source.path, num_tokens=num_tokens, num_needed=num_needed)
        self._options = TargetOptions.from_algo(spec.algo, num_tokens=num_needed)
        if self._options is not None and self._options.num_top is None and not has_product_logits(self.model):
            rule = f"be top_k with a teacher of the type {self.model.config.model_type}"
            fix = "set it to top_k; the logits of this teacher are changed after its output layer"
            raise ConfigError([Problem(path="algo.opd_kl", rule=rule, value="full", fix=fix)])

    def compute_targets(self, rollout: PackedRollout) -> tuple[Tensor, TeacherTargets | None]:
        """See TeacherRole; a collective of all ranks."""
        if self._options is None:
            return self.compute_logprobs(rollout), None
        return score_targets(self.model, rollout, temperature=self._temperature, options=self._options)

    @classmethod
    def from_spec(cls, spec: TrainerSpec, *, mesh: DeviceMesh, policy: PreTrainedModel) -> FsdpTeacher | None:
        """None where the advantages need no teacher. Raises ConfigError for one whose vocabulary is too small."""
        if spec.teacher is None or not uses_teacher(spec.algo):
            return None
        return cls(spec, spec.teacher, mesh=mesh, policy=policy)
