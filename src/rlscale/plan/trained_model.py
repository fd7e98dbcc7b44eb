"""Parameters of the policy that a run trains, by part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlscale.architectures.architecture import Architecture
from rlscale.config import RunConfig
from rlscale.plan.adapter_sizes import NO_ADAPTERS, AdapterSpec
from rlscale.plan.frozen_parameters import FrozenParameters, ModelPart, find_frozen
from rlscale.plan.mtp_layers import NO_MTP, MtpLayers


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """Parameters of the parts that the policy has, and how many of each are trained.

    Example:
        TrainedModel.from_config(config, architecture).trained
    """

    whole: Mapping[ModelPart, int]
    frozen: Mapping[ModelPart, int]
    adapters: int = 0  # parameters of adapters, next to which nothing else is trained
    mtp: MtpLayers = NO_MTP

    @classmethod
    def from_config(cls, config: RunConfig, a: Architecture, *, is_critic: bool = False) -> TrainedModel:
        """The parameters of a resolved config; of a critic, which has neither adapters nor further layers."""
        mtp, adapters = NO_MTP, NO_ADAPTERS
        if not is_critic:
            mtp, adapters = MtpLayers.from_config(config), AdapterSpec.from_config(config.train)
        frozen = find_frozen(a, config.train, num_mtp=mtp.number)
        whole = _part_sizes(a, mtp)
        if adapters.rank:
            return cls(whole=whole, frozen=whole, adapters=adapters.elements(a), mtp=mtp)
        return cls(whole=whole, frozen={part: _frozen_size(part, whole, frozen, mtp) for part in whole}, mtp=mtp)

    @property
    def parameters(self) -> int:
        """Parameters of all parts, without adapters."""
        return sum(self.whole.values())

    @property
    def trained(self) -> int:
        """Parameters with gradients and optimizer state."""
        return self.parameters - sum(self.frozen.values()) + self.adapters

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with derived sums."""
        parts = {
            str(part): {"parameters": size, "trained": size - self.frozen[part]} for part, size in self.whole.items()
        }
        return {"parameters": self.parameters, "trained": self.trained, "adapters": self.adapters, "parts": parts}


def _part_sizes(a: Architecture, mtp: MtpLayers) -> dict[ModelPart, int]:
    """Parameters of the parts that a model has."""
    tower = 0 if a.tower is None else a.tower.parameters
    found = {ModelPart.decoder: a.parameters - tower}
    if a.tower is not None:
        projector = a.tower.projector_parameters
        found |= {ModelPart.projector: projector, ModelPart.tower: tower - projector}
    return found | ({ModelPart.mtp: mtp.parameters(a)} if mtp.number else {})


def _frozen_size(part: ModelPart, whole: Mapping[ModelPart, int], frozen: FrozenParameters, mtp: MtpLayers) -> int:
    if part == ModelPart.mtp and not mtp.is_trained:
        return whole[part]
    return frozen.count(part)
