"""Program of one of two trainer ranks, which `test_optimizers.py` and `test_lora_ranks.py` start.

python -m tests.ranks.training.optimizer_ranks <rank> <port> <model> <folder> <case>...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlscale.config import LoraConfig, LoraSync, OptimizerName
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import TrainerSpec
from tests.ranks.training.fsdp_ranks import TWO_RANKS
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

BATCHES = [make_batch(RAGGED, seed=seed) for seed in range(3)]
ONE_RANK = [[[0, 1, 2, 3, 4, 5, 6, 7]]]

# By name: fields of the config groups. With a small eps Adam would turn the rounding of vanishing gradients into full
# steps.
CASES: dict[str, dict[str, Any]] = {
    "muon": {"name": OptimizerName.muon, "lr": 1e-3, "matrix_lr": 0.02, "embedding_lr": 3e-3, "adam_eps": 1e-4},
    "deepspeed_cpu_adam": {"name": OptimizerName.deepspeed_cpu_adam, "lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-4},
    "adam": {"name": OptimizerName.adam, "lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-4},
    "frozen_and_recomputed": {
        "lr": 1e-3,
        "adam_eps": 1e-4,
        "freeze_params": ["embed_tokens", r"layers\.0\."],
        "gradient_checkpointing": True,
        "recompute_loss_function": True,
    },
    "lora": {"lora": LoraConfig(rank=4, alpha=8, sync=LoraSync.adapter), "lr": 1e-2, "adam_eps": 1e-4},
}


def case_spec(case: str, model_path: str, **changes: Any) -> TrainerSpec:
    return spec(model_path, **{**CASES[case], **changes})


def run(case: str, model_path: str, *, rank: int, world_size: int, folder: Path) -> tuple[list[float], FsdpBackend]:
    """Gradient norms of three steps, and the trainer, which is saved before the last one."""
    cut = TWO_RANKS if world_size == 2 else ONE_RANK
    trainer = FsdpBackend(case_spec(case, model_path), rank=rank, world_size=world_size)
    norms = []
    for i, batch in enumerate(BATCHES):
        if i == 2:
            trainer.save(folder)
        norms.append(trainer.train(batch, [plan(batch, cut)]).steps[0]["grad_norm"])
    return norms, trainer


def main(rank: int, port: int, model_path: str, folder: Path, cases: Sequence[str]) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    for case in cases:
        saved = folder / case
        norms, trainer = run(case, model_path, rank=rank, world_size=2, folder=saved)
        final = {name: weight.clone() for name, weight in trainer.weights()}
        trainer.export_hf(folder / case / "hf")
        if trainer.adapters is not None:
            for part, sent in (("adapters", trainer.adapters.weights()), ("base", trainer.adapters.base_weights())):
                tensors = {name: tensor.clone() for name, tensor in sent}
                if rank == 0:
                    save_file(tensors, folder / f"{case}_{part}.safetensors")
        resumed = FsdpBackend(case_spec(case, model_path), rank=rank, world_size=2)
        resumed.load(saved)
        resumed.train(BATCHES[2], [plan(BATCHES[2], TWO_RANKS)])
        same = all(torch.equal(weight, final[name]) for name, weight in resumed.weights())
        report[case] = {"norms": norms, "resumed_exactly": same}
        if rank == 0:
            save_file(final, folder / f"{case}.safetensors")
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
    # All results are on disk. Threads of torch.distributed sometimes abort the interpreter at exit.
    os._exit(0)
