"""The reference model: what the KL terms measure the policy against."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rlscale.config import uses_reference
from rlscale.training.fsdp.model import copy_weights, has_shapes_of, load_sharded
from rlscale.training.fsdp.sources import load_weights
from rlscale.training.fsdp.step import score
from rlscale.training.rollout_state import Rollout
from rlscale.training.scorers import reference_cannot_follow
from rlscale.training.spec import ModelSource, TrainerSpec


class Reference:
    """A model that only scores. With `algo.ref_update_interval` it follows the policy, and is part of a checkpoint."""

    def __init__(self, spec: TrainerSpec, source: ModelSource, *, mesh: DeviceMesh, policy: PreTrainedModel) -> None:
        self._temperature, self._interval, self._policy = spec.temperature, spec.algo.ref_update_interval, policy
        self.model = load_sharded(source.path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=False)
        if source.checkpoint is not None:
            load_weights(source.checkpoint, model=self.model)
        if self._interval is not None and not has_shapes_of(policy, self.model):
            raise reference_cannot_follow(self._interval)

    @classmethod
    def of(cls, spec: TrainerSpec, *, mesh: DeviceMesh, policy: PreTrainedModel) -> Reference | None:
        """None where the loss needs none. Raises ConfigError for one that cannot follow the policy as it should."""
        if spec.ref_path is None or not uses_reference(spec.algo):
            return None
        source = ModelSource(path=spec.ref_path, checkpoint=spec.ref_checkpoint)
        return cls(spec, source, mesh=mesh, policy=policy)

    @property
    def state(self) -> PreTrainedModel | None:
        """What a checkpoint has to hold; None: it is what it was loaded from."""
        return None if self._interval is None else self.model

    def score(self, rollout: Rollout) -> None:
        """Fills `ref`; a collective."""
        with rollout.timed("ref_logprobs"):
            rollout.ref_logprobs = score(
                self.model, rollout.scored, num_tokens=len(rollout.batch.tokens), temperature=self._temperature
            )

    def is_due(self, num_rollouts: int) -> bool:
        """Whether it takes the policy's weights after so many rollouts have been trained on."""
        return self._interval is not None and num_rollouts % self._interval == 0

    def follow(self) -> None:
        """Takes the policy's weights."""
        copy_weights(self._policy, self.model)
