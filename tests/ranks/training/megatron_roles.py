"""Every role at once on both backends, for `megatron_ranks.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlscale.config import BatchConfig, MegatronConfig, ModelConfig, OffloadMode
from rlscale.training.backend import RoleBackend
from rlscale.training.critic_backend import CriticRanks
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.critic_backend import MegatronCriticBackend
from rlscale.training.spec import DedicatedRanks, ModelSource, OffloadSpec, TrainerSpec
from rlscale.types import TrainBatch
from tests.unit.training.role_ranks import NUM_ROLLOUTS, SAVED_AFTER, batch_of, everyone
from tests.unit.training.rollouts import plan

SAMPLES = [[0, 5, 6], [1, 2], [3, 4, 7], []]


def with_everyone(model: str, other: str, config: MegatronConfig, *, offload: OffloadSpec | None = None) -> TrainerSpec:
    """Policy, reference, teacher, critic and an earlier policy."""
    made = everyone(model, other, offload=offload)
    return replace(made, megatron=config, model=ModelConfig(use_hf_config_for_megatron=True))


def rollout_of(version: int) -> TrainBatch:
    """Without the padding token, whose embedding gets no gradient with transformers."""
    batch = batch_of(version)
    return replace(batch, tokens=np.where(batch.tokens == 0, 14, batch.tokens))


def train(backend: RoleBackend, version: int, num_data_ranks: int) -> dict[str, float]:
    batch = rollout_of(version)
    cut = [SAMPLES[i::num_data_ranks] for i in range(num_data_ranks)]
    result = backend.train(batch, [plan(batch, cut)])
    return {**result.steps[0], **result.metrics}


def rollouts(backend: RoleBackend, num_data_ranks: int) -> list[dict[str, float]]:
    return [train(backend, version, num_data_ranks) for version in range(NUM_ROLLOUTS)]


def weights_of(backend: RoleBackend) -> dict[str, torch.Tensor]:
    found = [{name: weight.clone() for name, weight in backend.weights()}]  # type: ignore[attr-defined]
    backend.offload()
    dist.broadcast_object_list(found, src=0)  # some come on rank 0 only
    return found[0]


def expected(model: str, other: str, *, rank: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What FSDP2 makes of three rollouts: metrics, and the policy's weights."""
    size = dist.get_world_size()
    backend = FsdpBackend(with_everyone(model, other, MegatronConfig()), rank=rank, world_size=size)
    return rollouts(backend, size), weights_of(backend)


def moved_and_saved(spec: TrainerSpec, folder: Path, *, rank: int, num_data_ranks: int) -> dict[str, Any]:
    """Three rollouts while roles take turns, and the third again by a run that is loaded, where all stay."""
    size = dist.get_world_size()
    config = replace(spec.megatron, async_save=True)
    # Whether copies on the host are kept (train.weights_backuper) changes nothing but memory: both ways are taken.
    offload = OffloadSpec(mode=OffloadMode.move, keeps_copies=config.tensor_model_parallel_size == 1)
    first = MegatronBackend(replace(spec, offload=offload, megatron=config), rank=rank, world_size=size)
    away = bytes_on_device(first)
    found = []
    for version in range(NUM_ROLLOUTS):
        if version == SAVED_AFTER:
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            first.save(folder)
        found.append(train(first, version, num_data_ranks))
    away = max(away, bytes_on_device(first))
    first.finish_saving()
    dist.barrier()
    weights = weights_of(first)
    first.close()
    second = MegatronBackend(spec, rank=rank, world_size=size)
    second.load(folder)
    same = train(second, SAVED_AFTER, num_data_ranks) == found[SAVED_AFTER]
    loaded = weights_of(second)
    second.close()
    exactly = same and all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    return {"rollouts": found, "weights": weights, "resumed exactly": exactly, "bytes at rest": away}


def bytes_on_device(backend: MegatronBackend) -> int:
    """Of weights, gradients and the optimisers' states."""
    total = 0
    for role in (backend.policy, backend.critic):
        assert role is not None
        parameters = [p for chunk in role.trainable.model.chunks for p in chunk.parameters()]
        gradients = [p.main_grad for p in parameters]
        states = [t for each in role.trainable.optimizer.chained_optimizers for t in _states(each.optimizer)]
        total += sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *gradients, *states) if tensor.dim())
    return total


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


def critic_apart(spec: TrainerSpec, *, rank: int, num_data_ranks: int) -> float:
    """The greatest difference of what critics with ranks of their own say and report, from FSDP2's."""
    assert spec.critic is not None
    size = dist.get_world_size()
    batch = BatchConfig(rollout_batch_size=2, n_samples_per_prompt=4)
    own = replace(spec, critic=replace(spec.critic, dedicated_ranks=DedicatedRanks(number=size, batch=batch)))
    theirs = _values_and_steps(FsdpCriticBackend(own, rank=rank, world_size=size), size)
    ours = MegatronCriticBackend(own, rank=rank, world_size=size)
    found = _values_and_steps(ours, num_data_ranks)
    ours.close()
    return float(np.abs(found - theirs).max())


def _values_and_steps(critic: CriticRanks, num_data_ranks: int) -> np.ndarray[Any, Any]:
    numbers = []
    for version in range(2):
        batch = rollout_of(version)
        cut = [SAMPLES[i::num_data_ranks] for i in range(num_data_ranks)]
        numbers.append(critic.values(batch, [plan(batch, cut)]))
        returns = np.random.default_rng(version).random(len(batch.tokens)).astype(np.float32)
        step = critic.train(returns).steps[0]
        numbers.append(np.array([step["critic_loss"], step["critic_grad_norm"], step["critic_value_error"]]))
    return np.concatenate(numbers)


def teacher_of_another_shape(spec: TrainerSpec, larger: str, *, rank: int, num_data_ranks: int) -> float:
    """The greatest difference of a rollout's metrics from FSDP2's, with a teacher of more layers."""
    spec, size = replace(spec, teacher=ModelSource(path=larger), critic=None), dist.get_world_size()
    algo = replace(spec.algo, advantage_estimator="grpo", ref_update_interval=None)  # type: ignore[arg-type]
    spec = replace(spec, algo=algo, ref_path=larger)
    theirs = train(FsdpBackend(spec, rank=rank, world_size=size), 0, size)
    ours = MegatronBackend(spec, rank=rank, world_size=size)
    found = train(ours, 0, num_data_ranks)
    ours.close()
    assert found.keys() == theirs.keys() and "rollout/teacher_kl" in found
    return max(abs(found[name] - theirs[name]) for name in theirs)
