"""Program of one of two trainer ranks, which `test_fsdp_backend.py` starts.

python -m tests.ranks.training.fsdp_ranks <rank> <port> <model> <folder>
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig, ComputeDtype, MisConfig, MisLevel, QkvFormat
from rlscale.data.microbatch_plan import plan_steps
from rlscale.errors import WorkerError
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch
from tests.ranks.training.fsdp_features import FEATURES, train_feature
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec
from tests.unit.training.user_functions import ALL, HERE

NUM_STEPS = 3
BATCHES = [make_batch(RAGGED, seed=seed) for seed in range(NUM_STEPS)]
TWO_RANKS = [[[0, 5, 6], [1, 2]], [[3, 4, 7], []]]  # uneven, and one rank has an empty micro-batch at the end
BALANCED = make_batch([(3, 27), (2, 20), (2, 8), (2, 6), (1, 3), (1, 1)], seed=0)
SAVED_AFTER = 2
REQUESTED = (0, 4, 5)  # of both ranks


def full_spec(model_path: str, **changes: Any) -> TrainerSpec:
    algo = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "entropy_coef": 0.01,
        "use_tis": True,
    }
    # With a small eps Adam would turn the rounding of vanishing gradients into full steps.
    return spec(model_path, algo=algo, ref_path=model_path, adam_eps=1e-4, lr_decay_style="cosine", **changes)


def whole_rollout_spec(model_path: str, **changes: Any) -> TrainerSpec:
    """Spec that needs columns, or sums, of the whole rollout before the first step."""
    algo = {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "kl_coef": 0.5,
        "kl_loss_type": "k2",
        "gamma": 0.9,
        "use_tis": True,
        "tis_type": "mis",
        "mis": MisConfig(level=MisLevel.sequence, normalize=True),
        "divide_by_max_response_len": True,
        "use_rollout_entropy": True,
    }
    return spec(model_path, algo=algo, adam_eps=1e-4, **changes)


def user_spec(model_path: str, **changes: Any) -> TrainerSpec:
    """Spec with all functions of the user."""
    more = {"custom": {"scale": 0.5, "bound": 0.1}, "rollout_data_postprocess_path": f"{HERE}:bounded"}
    return spec(model_path, algo=ALL, adam_eps=1e-4, **more, **changes)


def train(backend: FsdpBackend, batch: TrainBatch, cut: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    result = backend.train(batch, [plan(batch, cut)])
    return {**result.steps[0], **result.metrics}


def other_micro_batches(model_path: str, rank: int) -> dict[str, dict[str, float]]:
    """The first step with padded rows, and with other micro-batches in passes without gradient."""
    padded = FsdpBackend(full_spec(model_path, qkv_format=QkvFormat.bshd), rank=rank, world_size=2)
    scoring = FsdpBackend(full_spec(model_path, reuse_logprobs=False), rank=rank, world_size=2)
    step = replace(plan(BATCHES[0], TWO_RANKS), scoring=(((0, 5, 6, 1, 2),), ((3, 4, 7),)))
    result = scoring.train(BATCHES[0], [step])
    return {"padded": train(padded, BATCHES[0], TWO_RANKS), "scoring": {**result.steps[0], **result.metrics}}


def balanced(model_path: str, rank: int) -> dict[str, Any]:
    """A step with `batch.balance_data`, for models with much and with little attention."""
    config = BatchConfig(rollout_batch_size=6, use_dynamic_batch_size=True, max_tokens_per_gpu=32, balance_data=True)
    report: dict[str, Any] = {"metrics": [], "shares": []}
    for per_token in (15, 49):
        cost = ForwardCost(per_token=per_token, per_pair=2, per_logit_row=0)
        (step,) = plan_steps(BALANCED, config, num_ranks=2, cost=cost)
        result = FsdpBackend(full_spec(model_path), rank=rank, world_size=2).train(BALANCED, [step])
        report["metrics"].append({**result.steps[0], **result.metrics})
        report["shares"].append([sorted(i for micro in share for i in micro) for share in step.microbatches])
    return report


def nan_on_rank_1(model_path: str, rank: int) -> str:
    """Message of every rank when only the loss of rank 1 is NaN."""
    batch = BATCHES[0]
    logprobs = batch.rollout_logprobs.copy()
    # Sample 3 is on rank 1.
    logprobs[batch.offsets[3] : batch.offsets[4]] = np.nan
    backend = FsdpBackend(spec(model_path, algo={"use_rollout_logprobs": True}), rank=rank, world_size=2)
    step: StepPlan = plan(batch, TWO_RANKS)
    try:
        backend.train(replace(batch, rollout_logprobs=logprobs), [step])
    except WorkerError as error:
        return str(error)
    return "no error"


def uneven_metrics(model_path: str, rank: int) -> str:
    """Message of every rank when a function of the user has a metric on rank 0 only."""
    backend = FsdpBackend(
        spec(model_path, rollout_data_postprocess_path=f"{HERE}:uneven", custom={}), rank=rank, world_size=2
    )
    try:
        backend.train(BATCHES[0], [plan(BATCHES[0], TWO_RANKS)])
    except ValueError as error:
        return str(error)
    return "no error"


def main(rank: int, port: int, model_path: str, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    backend = FsdpBackend(full_spec(model_path), rank=rank, world_size=2)
    steps = []
    for i, batch in enumerate(BATCHES):
        if i == SAVED_AFTER:
            backend.save(folder / "saved")
            at_save = {name: weight.clone() for name, weight in backend.weights()}
        steps.append(train(backend, batch, TWO_RANKS))
    final = {name: weight.clone() for name, weight in backend.weights()}
    backend.export_hf(folder / "hf")

    resumed = FsdpBackend(full_spec(model_path), rank=rank, world_size=2)
    resumed.load(folder / "saved")
    again = train(resumed, BATCHES[SAVED_AFTER], TWO_RANKS)
    same = all(torch.equal(weight, final[name]) for name, weight in resumed.weights())

    requesting = FsdpBackend(full_spec(model_path), rank=rank, world_size=2)
    requested = requesting.train(
        replace(BATCHES[0], logprob_samples=REQUESTED, returns_columns=True), [plan(BATCHES[0], TWO_RANKS)]
    )

    whole = FsdpBackend(whole_rollout_spec(model_path, ref_path=str(folder / "hf")), rank=rank, world_size=2)

    users = FsdpBackend(user_spec(model_path), rank=rank, world_size=2)

    low = FsdpBackend(full_spec(model_path, dtype=ComputeDtype.bfloat16), rank=rank, world_size=2)
    bfloat16 = [train(low, batch, TWO_RANKS) for batch in BATCHES]
    report = {
        "steps": steps,
        "resumed_exactly": again == steps[SAVED_AFTER] and same,
        "bfloat16_is_finite": all(math.isfinite(v) for step in bfloat16 for v in step.values()),
        "bfloat16_first": bfloat16[0],
        "nan": nan_on_rank_1(model_path, rank),
        "uneven": uneven_metrics(model_path, rank),
        "columns": {name: column.tolist() for name, column in requested.columns.items()},
        "requested": {str(i): values.tolist() for i, values in requested.logprobs.items()},
        "request_changes_no_metric": {**requested.steps[0], **requested.metrics} == steps[0],
        "whole_rollout": [train(whole, batch, TWO_RANKS) for batch in BATCHES[:2]],
        "user_functions": [train(users, batch, TWO_RANKS) for batch in BATCHES[:2]],
        "other_micro_batches": other_micro_batches(model_path, rank),
        "balanced": balanced(model_path, rank),
        "features": {name: train_feature(name, model_path, rank=rank, world_size=2) for name in FEATURES},
        "threads": torch.get_num_threads(),
    }
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    if rank == 0:
        save_file(final, folder / "final.safetensors")
        save_file(at_save, folder / "at_save.safetensors")
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    # All results are on disk. Threads of torch.distributed sometimes abort the interpreter at exit.
    os._exit(0)
