"""The teacher of on-policy distillation: a model whose opinion of every token enters the advantages."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rlscale.config import uses_teacher
from rlscale.training.fsdp.model import load_sharded
from rlscale.training.fsdp.sources import load_weights
from rlscale.training.fsdp.step import score
from rlscale.training.rollout_state import Rollout
from rlscale.training.scorers import require_tokens
from rlscale.training.spec import ModelSource, TrainerSpec


class Teacher:
    """A model of any architecture with the policy's tokens, which only scores and never changes."""

    def __init__(self, spec: TrainerSpec, source: ModelSource, *, mesh: DeviceMesh, policy: PreTrainedModel) -> None:
        self._temperature = spec.temperature
        self.model = load_sharded(source.path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=False)
        if source.checkpoint is not None:
            load_weights(source.checkpoint, model=self.model)
        require_tokens(source.path, known=self.model.config.vocab_size, needed=policy.config.vocab_size)

    @classmethod
    def of(cls, spec: TrainerSpec, *, mesh: DeviceMesh, policy: PreTrainedModel) -> Teacher | None:
        """None where the advantages need none. Raises ConfigError for a teacher that lacks tokens."""
        if spec.teacher is None or not uses_teacher(spec.algo):
            return None
        return cls(spec, spec.teacher, mesh=mesh, policy=policy)

    def score(self, rollout: Rollout) -> None:
        """Fills `teacher`; a collective. The temperature is the policy's, as the two are compared."""
        with rollout.timed("teacher_logprobs"):
            rollout.teacher = score(
                self.model, rollout.scored, num_tokens=len(rollout.batch.tokens), temperature=self._temperature
            )
