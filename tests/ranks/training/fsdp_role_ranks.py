"""Program of one of two trainer ranks, which `test_fsdp_roles.py` starts.

python -m tests.ranks.training.fsdp_role_ranks <rank> <port> <model> <other model> <folder>
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlscale.config import BatchConfig, OffloadMode
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.spec import CriticSpec, DedicatedRanks, ModelSource, OffloadSpec, TrainerSpec
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

TWO_RANKS = [[[0, 5, 6], [1, 2]], [[3, 4, 7], []]]
SAVED_AFTER, NUM_ROLLOUTS = 2, 3


def batch_of(version: int) -> TrainBatch:
    """A rollout whose sample 4 is of the previous version."""
    made = make_batch(RAGGED, seed=version)
    versions = np.where(made.loss_mask, version, -1).astype(np.int32)
    # Prompt tokens have the version -1.
    rows = slice(int(made.offsets[4]), int(made.offsets[5]))
    versions[rows] = np.where(made.loss_mask[rows], max(version - 1, 0), -1)
    return replace(made, weight_versions=versions, version=version)


def all_roles(model_path: str, other: str, *, offload: OffloadSpec | None = None) -> TrainerSpec:
    """Spec with policy, reference, teacher, critic and an earlier policy."""
    algo = {"advantage_estimator": "ppo", "lambd": 0.9, "kl_coef": 0.2, "kl_loss_type": "k2", "opd_kl_coef": 0.1}
    return spec(
        model_path,
        # Two passes: a later one must leave the columns of the first one unchanged on every backend.
        algo={**algo, "ref_update_interval": 2, "ppo_epochs": 2},
        ref_path=model_path,
        teacher=ModelSource(path=other),
        critic=CriticSpec(source=ModelSource(path=model_path), lr=1e-2),
        offload=offload,
        num_old_policies=1,
        adam_eps=1e-4,  # with a small eps Adam would turn the rounding of vanishing gradients into full steps
    )


def distilled(model_path: str, other: str, kind: str) -> TrainerSpec:
    """Spec of a policy whose loss has the divergence from a teacher over tokens, in tiles of the vocabulary."""
    algo = {"opd_kl_coef": 0.5, "opd_kl": kind, "opd_top_k": 3}
    return spec(model_path, algo=algo, teacher=ModelSource(path=other), adam_eps=1e-4, log_probs_chunk_size=2)


def train(backend: FsdpBackend, version: int, cut: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    batch = batch_of(version)
    result = backend.train(batch, [plan(batch, cut)])
    return {**result.steps[0], **result.metrics}


def critic_of(model_path: str, *, number: int) -> TrainerSpec:
    """Spec of a critic on dedicated ranks."""
    own = DedicatedRanks(number=number, batch=BatchConfig(rollout_batch_size=2, n_samples_per_prompt=4))
    critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2, dedicated_ranks=own)
    return spec(model_path, algo={"advantage_estimator": "ppo"}, critic=critic, adam_eps=1e-4)


def value(critic: FsdpCriticBackend, version: int, cut: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """A rollout on the critic's ranks, with made-up returns of the policy's ranks."""
    batch = batch_of(version)
    values = critic.values(batch, [plan(batch, cut)])
    returns = np.where(batch.loss_mask, np.cos(np.arange(len(batch.tokens))), 0.0).astype(np.float32)
    return {"values": values[batch.loss_mask > 0].tolist(), **critic.train(returns).steps[0]}


def main(rank: int, port: int, model_path: str, other: str, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    moving = all_roles(model_path, other, offload=OffloadSpec(mode=OffloadMode.move))
    backend = FsdpBackend(moving, rank=rank, world_size=2)
    rollouts = []
    for version in range(NUM_ROLLOUTS):
        if version == SAVED_AFTER:
            backend.save(folder / "saved")
        rollouts.append(train(backend, version, TWO_RANKS))
    resumed = FsdpBackend(all_roles(model_path, other), rank=rank, world_size=2)
    resumed.load(folder / "saved")
    again = train(resumed, SAVED_AFTER, TWO_RANKS)
    pairs = zip(resumed.weights(), backend.weights(), strict=True)
    same = all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    critic = FsdpCriticBackend(critic_of(model_path, number=2), rank=rank, world_size=2)
    valued = []
    for version in range(NUM_ROLLOUTS):
        if version == SAVED_AFTER:
            critic.save(folder / "critic_saved")
        valued.append(value(critic, version, TWO_RANKS))
    distills = [
        train(FsdpBackend(distilled(model_path, other, kind), rank=rank, world_size=2), 0, TWO_RANKS)
        for kind in ("top_k", "full")
    ]
    report = {
        "distilled": distills,
        "rollouts": rollouts,
        "valued": valued,
        "resumed_exactly": again == rollouts[SAVED_AFTER] and same,
    }
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    # All results are on disk. Threads of torch.distributed sometimes abort the interpreter at exit.
    os._exit(0)
