"""Bytes of a checkpoint and of the export, for the plan and for the check of the disk before a run.

FSDP2 saves float32 weights and the moments of trained parameters; Megatron-core weights in the dtype of the training,
and master weights and moments in float32. With adapters both save the base, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlscale.architectures.architecture import Architecture
from rlscale.config import OptimizerName, RunConfig, TrainBackendName
from rlscale.plan.activations import FLOAT32
from rlscale.plan.frozen_parameters import find_frozen
from rlscale.plan.hardware import DTYPE_BYTES
from rlscale.plan.mtp_layers import MtpLayers
from rlscale.plan.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSize:
    """Bytes of the tensors that are written. Files have some kilobytes more."""

    weights: int  # of the policy
    optimizer: int
    reference: int = 0  # 0: it is not updated
    critic: int = 0  # its weights and optimizer state
    export: int = 0  # the last one, in Hugging Face format; 0: there is none

    @property
    def total(self) -> int:
        """Bytes of one checkpoint."""
        return self.weights + self.optimizer + self.reference + self.critic

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with derived sums."""
        return {**asdict(self), "total": self.total}


def checkpoint_size(config: RunConfig, models: Mapping[str, Architecture]) -> CheckpointSize | None:
    """The size of a checkpoint of a resolved config. None: the run saves none.

    Args:
        models: architectures by role, of `plan.model_size.list_architectures`.
    """
    checkpoint, a = config.checkpoint, models["policy"]
    saves = checkpoint.save_final or checkpoint.save_interval is not None
    if config.debug.rollout_only or not saves or checkpoint.save is None:
        return None
    mtp = MtpLayers.from_config(config)
    weights, optimizer = _model_bytes(config, a, TrainedModel.from_config(config, a))
    critic = 0
    if "critic" in models:
        critic = sum(
            _model_bytes(config, models["critic"], TrainedModel.from_config(config, models["critic"], is_critic=True))
        )
    reference = 0
    if "reference" in models and config.algo.ref_update_interval is not None:
        reference = _weight_bytes(config) * models["reference"].parameters
    exported = a.parameters + mtp.parameters(a) + mtp.copied_parameters(a)
    return CheckpointSize(
        weights=weights,
        optimizer=optimizer,
        reference=reference,
        critic=critic,
        export=DTYPE_BYTES[config.train.dtype] * exported if checkpoint.save_final else 0,
    )


def _weight_bytes(config: RunConfig) -> int:
    is_megatron = config.train.backend == TrainBackendName.megatron
    return DTYPE_BYTES[config.train.dtype] if is_megatron else FLOAT32


def _model_bytes(config: RunConfig, a: Architecture, model: TrainedModel) -> tuple[int, int]:
    """Bytes of weights, and of the state of the optimizer."""
    weights = _weight_bytes(config) * (model.parameters + model.adapters)
    is_megatron = config.train.backend == TrainBackendName.megatron
    state = model.trained * (3 if is_megatron else 2)
    if config.optim.name == OptimizerName.muon and not model.adapters:
        state -= _layer_matrices(a) - sum(map(math.prod, find_frozen(a, config.train).layer_matrices))
    return weights, FLOAT32 * state


def _layer_matrices(a: Architecture) -> int:
    """Elements of the matrices inside layers, of which Muon has one moment."""
    return sum(
        number * sum(math.prod(shape) for shape in a.layer_shapes(layer) if len(shape) > 1)
        for layer, number in a.kinds.items()
    )
