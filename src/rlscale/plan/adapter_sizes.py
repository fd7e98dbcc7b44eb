"""Sizes of LoRA adapters: A [rank, in] and B [out, rank] of each matrix that gets one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rlscale.architectures.architecture import Architecture
from rlscale.config import TrainConfig
from rlscale.plan.frozen_parameters import ModelPart, NamedParameter, list_parameters
from rlscale.plan.megatron_activations import ParallelSizes

BY_INPUTS = frozenset({"o_proj", "out_proj", "down_proj"})
"""Layers whose inputs tensor parallelism divides; of the others it divides the outputs."""

NOT_LINEAR = frozenset({"proj", "pos_embed"})
"""Modules of vision towers whose names are not only those of linear layers, see `training.modules.lora`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """Rank of the adapters, and the layers that get them.

    Example:
        AdapterSpec.from_config(config.train).elements(architecture)
    """

    rank: int = 0  # 0: all weights are trained
    targets: tuple[str, ...] | None = None  # last name components of layers; None: all that may

    @classmethod
    def from_config(cls, train: TrainConfig) -> AdapterSpec:
        """The adapters of a resolved group `train`."""
        targets = train.lora.target_modules
        return cls(rank=train.lora.rank, targets=None if targets is None else tuple(targets))

    def elements(self, a: Architecture) -> int:
        """Elements of all adapters."""
        return self.rank * sum(sum(each.shape) for each in _adapted(a, self.targets)) if self.rank else 0

    def stage_elements(self, a: Architecture, parallel: ParallelSizes) -> float:
        """Elements on a Megatron-core rank of the fullest stage. The tensor-parallel ranks divide A or B.

        The first stage has the vision tower, whole on each of these ranks.
        """
        per_stage, found = math.ceil(a.num_layers / parallel.pipeline), 0.0
        for each in _adapted(a, self.targets):
            outputs, inputs = each.shape
            if each.part != ModelPart.decoder:
                found += self.rank * (inputs + outputs)
            elif (each.layer or 0) < per_stage:
                whole, divided = (outputs, inputs) if _module_name(each) in BY_INPUTS else (inputs, outputs)
                found += self.rank * (whole + divided / parallel.tensor)
        return found


NO_ADAPTERS = AdapterSpec()
_IN_ATTENTION = re.compile(r"[.](self|linear)_attn[.]")


@cache
def _adapted(a: Architecture, targets: tuple[str, ...] | None) -> tuple[NamedParameter, ...]:
    """The matrices of layers and vision tower that get adapters; next to experts only those of attention."""
    return tuple(_find_adapted(a, targets))


def _find_adapted(a: Architecture, targets: tuple[str, ...] | None) -> Iterator[NamedParameter]:
    for each in list_parameters(a):
        name = _module_name(each)
        if len(each.shape) != 2 or (each.part == ModelPart.decoder and each.layer is None):
            continue
        is_in_mlp = each.part == ModelPart.decoder and not _IN_ATTENTION.search(each.name)
        may = not (is_in_mlp and a.num_experts) and name not in NOT_LINEAR and not name.isdigit()
        if may and (targets is None or name in targets):
            yield each


def _module_name(each: NamedParameter) -> str:
    return each.name.split(".")[-2]
