"""Roles of models with images on both backends, for `megatron_vision_ranks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlscale.architectures.family import find_family
from rlscale.config import BatchConfig, MegatronConfig
from rlscale.training.critic_backend import CriticBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.megatron.critic_backend import MegatronCriticBackend
from rlscale.training.megatron.hf_mapping.export_hf import Exporter
from rlscale.training.megatron.hf_mapping.mapping import OUTPUT_LAYER, map_weights
from rlscale.training.spec import CriticSpec, DedicatedRanks, ModelSource
from rlscale.types import TrainBatch
from tests.ranks.training.megatron_ranks import data_ranks
from tests.unit.training.rollouts import plan, spec

NUM_ROLLOUTS = 3


def critic_difference(
    path: str, megatron: MegatronConfig, batch: TrainBatch, samples: Sequence[Sequence[int]], *, rank: int
) -> float:
    """Largest difference of values, metrics and weights between the critics of both backends.

    The value head starts at 0, so layers and tower have a gradient from the second step on.
    """
    ranks = DedicatedRanks(number=2, batch=BatchConfig(rollout_batch_size=3, n_samples_per_prompt=2))
    critic = CriticSpec(source=ModelSource(path=path), lr=1e-2, dedicated_ranks=ranks)
    made = spec(path, megatron=megatron, algo={"advantage_estimator": "ppo"}, critic=critic, adam_eps=1e-4)
    theirs, ours = (kind(made, rank=rank, world_size=2) for kind in (FsdpCriticBackend, MegatronCriticBackend))
    expected = _train(theirs, batch, samples, num_data_ranks=2)
    found = _train(ours, batch, samples, num_data_ranks=data_ranks(megatron))
    worst = [float(np.abs(found - expected).max())]
    model = theirs.critic.model
    vision = find_family(model.config.model_type).vision
    assert vision is not None and found[-1] > 0, "a model with images and its gradient norm"
    weights = {name: _full(parameter) for name, parameter in model.named_parameters()}
    own = ours.critic.trainable.model
    # Hugging Face has no value head.
    mapped = [each for each in map_weights(own.architecture) if each.weight.megatron != OUTPUT_LAYER]
    for name, weight in Exporter(own, mapped=mapped).weights():
        worst.append(float((weight - weights.pop(vision.in_memory(name))).abs().max()))
    assert rank or list(weights) == ["lm_head.weight"], "rank 0 gets all others"
    ours.close()
    return max(worst)


def _train(
    critic: CriticBackend, batch: TrainBatch, samples: Sequence[Sequence[int]], *, num_data_ranks: int
) -> np.ndarray[Any, Any]:
    """Values before each step, with loss and gradient norm."""
    returns = np.where(batch.loss_mask, np.cos(np.arange(len(batch.tokens))), 0.0).astype(np.float32)
    numbers = []
    for _ in range(NUM_ROLLOUTS):
        numbers.append(critic.values(batch, [plan(batch, [samples[i::num_data_ranks] for i in range(num_data_ranks)])]))
        step = critic.train(returns).steps[0]
        numbers.append(np.array([step["critic_loss"], step["critic_grad_norm"]]))
    return np.concatenate(numbers)


def _full(parameter: Tensor) -> Tensor:
    own = parameter.detach()
    return own.full_tensor() if isinstance(own, DTensor) else own
