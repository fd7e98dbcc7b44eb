"""Roles of models with images on both backends, for `megatron_vision_ranks.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlscale.architectures.family import find_family
from rlscale.config import BatchConfig, LoraConfig, MegatronConfig, ModelConfig, OptimizerName
from rlscale.protocols import TrainBackend
from rlscale.training.critic_backend import CriticBackend
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf
from rlscale.training.megatron.critic_backend import MegatronCriticBackend
from rlscale.training.megatron.hf_mapping.export_hf import Exporter
from rlscale.training.megatron.hf_mapping.mapping import OUTPUT_LAYER, map_weights
from rlscale.training.spec import CriticSpec, DedicatedRanks, ModelSource
from rlscale.types import StepPlan, TrainBatch
from tests.ranks.training.fsdp_ranks import full_spec
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


def muon_difference(
    path: str, megatron: MegatronConfig, batch: TrainBatch, samples: Sequence[Sequence[int]], *, rank: int
) -> float:
    """Largest difference of metrics and weights between both backends, over three steps of Muon."""
    muon: dict[str, Any] = {"name": OptimizerName.muon, "lr": 1e-3, "matrix_lr": 0.02}
    made = full_spec(path, model=ModelConfig(use_hf_config_for_megatron=True), megatron=megatron, **muon)
    expected, weights = _steps(FsdpBackend(made, rank=rank, world_size=2), batch, samples, num_data_ranks=2)
    ours = MegatronBackend(made, rank=rank, world_size=2)
    found, own = _steps(ours, batch, samples, num_data_ranks=data_ranks(megatron))
    ours.close()
    return max(_metric_difference(found, expected), _weight_difference(own, weights))


def adapter_folder(reports: Path, case: str) -> Path:
    """The exports of runs with adapters."""
    return reports / f"{case}, adapters"


def adapters(
    path: str, megatron: MegatronConfig, batch: TrainBatch, samples: Sequence[Sequence[int]], folder: Path, *, rank: int
) -> dict[str, Any]:
    """Largest differences of metrics and merged weights between both backends, over three steps.

    Both write their exports into `folder`. The run on Megatron-core is also continued, and its checkpoint converted.
    """
    changes: dict[str, Any] = {"lora": LoraConfig(rank=2, alpha=4), "megatron": megatron}
    made = full_spec(path, model=ModelConfig(use_hf_config_for_megatron=True), **changes)
    fsdp: TrainBackend = FsdpBackend(made, rank=rank, world_size=2)
    expected, sent = _steps(fsdp, batch, samples, num_data_ranks=2)
    ours = MegatronBackend(made, rank=rank, world_size=2)
    if rank == 0:
        (folder / "saved").mkdir(parents=True)
    dist.barrier()
    before = {name: weight.clone() for name, weight in ours.weights()}
    found, weights = _steps(ours, batch, samples, num_data_ranks=data_ranks(megatron))
    ours.save(folder / "saved")
    fsdp.export_hf(folder / "fsdp")
    ours.export_hf(folder / "hf")
    number = _step(ours, batch, samples, num_data_ranks=data_ranks(megatron))
    ours.close()
    again = MegatronBackend(made, rank=rank, world_size=2)
    again.load(folder / "saved")
    same = _step(again, batch, samples, num_data_ranks=data_ranks(megatron)) == number
    again.close()
    convert_to_hf(folder / "saved", folder / "converted", model=path, sizes=megatron, dtype=torch.float32)
    dist.barrier()
    converted = load_file(folder / "converted" / "model.safetensors")
    return {
        "numbers": _metric_difference(found, expected),
        "weights": _weight_difference(weights, sent),
        "changed": [name for name, weight in weights.items() if not torch.equal(weight, before[name])],
        "resumed": same,
        "converted": all(torch.equal(converted[name], weight) for name, weight in weights.items()),
    }


def _steps(
    backend: TrainBackend, batch: TrainBatch, samples: Sequence[Sequence[int]], *, num_data_ranks: int
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of three steps, and the weights that engines get after them."""
    steps = [_step(backend, batch, samples, num_data_ranks=num_data_ranks) for _ in range(NUM_ROLLOUTS)]
    return steps, {name: weight.clone() for name, weight in backend.weights()}


def _train(
    critic: CriticBackend, batch: TrainBatch, samples: Sequence[Sequence[int]], *, num_data_ranks: int
) -> np.ndarray[Any, Any]:
    """Values before each step, with loss and gradient norm."""
    returns = np.where(batch.loss_mask, np.cos(np.arange(len(batch.tokens))), 0.0).astype(np.float32)
    numbers = []
    for _ in range(NUM_ROLLOUTS):
        numbers.append(critic.values(batch, [_plan(batch, samples, num_data_ranks=num_data_ranks)]))
        step = critic.train(returns).steps[0]
        numbers.append(np.array([step["critic_loss"], step["critic_grad_norm"]]))
    return np.concatenate(numbers)


def _step(
    backend: TrainBackend, batch: TrainBatch, samples: Sequence[Sequence[int]], *, num_data_ranks: int
) -> dict[str, float]:
    return dict(backend.train(batch, [_plan(batch, samples, num_data_ranks=num_data_ranks)]).steps[0])


def _plan(batch: TrainBatch, samples: Sequence[Sequence[int]], *, num_data_ranks: int) -> StepPlan:
    return plan(batch, [samples[i::num_data_ranks] for i in range(num_data_ranks)])


def _metric_difference(steps: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> float:
    return max(abs(a[name] - b[name]) for a, b in zip(steps, others, strict=True) for name in a)


def _weight_difference(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Largest difference; 0 on a rank that gets no weights."""
    return max((float((weight - others[name]).abs().max()) for name, weight in weights.items()), default=0.0)


def _full(parameter: Tensor) -> Tensor:
    own = parameter.detach()
    return own.full_tensor() if isinstance(own, DTensor) else own
