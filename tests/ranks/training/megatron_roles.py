"""Runs with all roles on both backends, for `megatron_ranks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlscale.config import BatchConfig, MegatronConfig, ModelConfig, OffloadMode
from rlscale.config.groups.algo import OpdDirection, OpdKl
from rlscale.training.backend import RoleBackend
from rlscale.training.critic_backend import CriticBackend
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.critic_backend import MegatronCriticBackend
from rlscale.training.spec import DedicatedRanks, ModelSource, OffloadSpec, TrainerSpec
from rlscale.types import TrainBatch
from tests.ranks.training.fsdp_role_ranks import NUM_ROLLOUTS, SAVED_AFTER, all_roles, batch_of
from tests.unit.training.rollouts import plan

SAMPLES = [[0, 5, 6], [1, 2], [3, 4, 7], []]


def all_roles_spec(
    model: str, other: str, config: MegatronConfig, *, offload: OffloadSpec | None = None
) -> TrainerSpec:
    """A spec with policy, reference, teacher, critic and an earlier version of the policy."""
    made = all_roles(model, other, offload=offload)
    return replace(made, megatron=config, model=ModelConfig(use_hf_config_for_megatron=True))


def rollout_of(version: int) -> TrainBatch:
    """A rollout without the padding token, whose embedding gets no gradient in transformers."""
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
    dist.broadcast_object_list(found, src=0)  # rank 0 alone exports some of them
    return found[0]


def expected(model: str, other: str, *, rank: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of three rollouts with FSDP2, and the policy's weights after them."""
    size = dist.get_world_size()
    backend = FsdpBackend(all_roles_spec(model, other, MegatronConfig()), rank=rank, world_size=size)
    return rollouts(backend, size), weights_of(backend)


def train_with_offload(spec: TrainerSpec, folder: Path, *, rank: int, num_data_ranks: int) -> dict[str, Any]:
    """Trains three rollouts with offloading, and the third again without it in a run that loads the checkpoint."""
    size = dist.get_world_size()
    config = replace(spec.megatron, async_save=True)
    # Copies kept on the host (train.weights_backuper) change only memory; the modes cover both settings.
    offload = OffloadSpec(mode=OffloadMode.move, keeps_copies=config.tensor_model_parallel_size == 1)
    first = MegatronBackend(replace(spec, offload=offload, megatron=config), rank=rank, world_size=size)
    offloaded_bytes = bytes_on_device(first)
    found = []
    for version in range(NUM_ROLLOUTS):
        if version == SAVED_AFTER:
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            first.save(folder)
        found.append(train(first, version, num_data_ranks))
    offloaded_bytes = max(offloaded_bytes, bytes_on_device(first))
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
    return {"rollouts": found, "weights": weights, "resumed exactly": exactly, "bytes when offloaded": offloaded_bytes}


def bytes_on_device(backend: MegatronBackend) -> int:
    """Bytes of weights, gradients and optimiser states on the device."""
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


def dedicated_critic_difference(spec: TrainerSpec, *, rank: int, num_data_ranks: int) -> float:
    """Largest difference of values and metrics between critics on dedicated ranks of both backends."""
    assert spec.critic is not None
    size = dist.get_world_size()
    batch = BatchConfig(rollout_batch_size=2, n_samples_per_prompt=4)
    own = replace(spec, critic=replace(spec.critic, dedicated_ranks=DedicatedRanks(number=size, batch=batch)))
    theirs = _values_and_steps(FsdpCriticBackend(own, rank=rank, world_size=size), size)
    ours = MegatronCriticBackend(own, rank=rank, world_size=size)
    found = _values_and_steps(ours, num_data_ranks)
    ours.close()
    return float(np.abs(found - theirs).max())


def _values_and_steps(critic: CriticBackend, num_data_ranks: int) -> np.ndarray[Any, Any]:
    numbers = []
    for version in range(2):
        batch = rollout_of(version)
        cut = [SAMPLES[i::num_data_ranks] for i in range(num_data_ranks)]
        numbers.append(critic.values(batch, [plan(batch, cut)]))
        returns = np.random.default_rng(version).random(len(batch.tokens)).astype(np.float32)
        step = critic.train(returns).steps[0]
        numbers.append(np.array([step["critic_loss"], step["critic_grad_norm"], step["critic_value_error"]]))
    return np.concatenate(numbers)


DIRECTIONS = {OpdKl.full: OpdDirection.reverse, OpdKl.top_k: OpdDirection.forward}


def larger_teacher_difference(
    spec: TrainerSpec, larger: str, *, rank: int, num_data_ranks: int, kinds: Sequence[str] = tuple(DIRECTIONS)
) -> float:
    """Largest difference of a rollout's metrics between both backends, with a teacher that has more layers.

    Its most likely tokens are in the loss, or its whole distribution: `kinds` of `algo.opd_kl`.
    """
    spec, size = replace(spec, teacher=ModelSource(path=larger), critic=None), dist.get_world_size()
    algo = replace(spec.algo, advantage_estimator="grpo", ref_update_interval=None)  # type: ignore[arg-type]
    differences = []
    for kind in map(OpdKl, kinds):
        own = replace(algo, opd_kl=kind, opd_direction=DIRECTIONS[kind], opd_top_k=5)
        spec = replace(spec, algo=own, ref_path=larger)
        theirs = train(FsdpBackend(spec, rank=rank, world_size=size), 0, size)
        ours = MegatronBackend(spec, rank=rank, world_size=size)
        found = train(ours, 0, num_data_ranks)
        ours.close()
        assert found.keys() == theirs.keys() and {"rollout/teacher_kl", "teacher_kl", "grad_norm"} <= found.keys()
        differences += [abs(found[name] - theirs[name]) for name in theirs]
    return max(differences)
