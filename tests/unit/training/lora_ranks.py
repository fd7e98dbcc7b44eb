"""What one of two trainer ranks does for `test_lora.py`, which starts this file as a program.

python -m tests.unit.training.lora_ranks <rank> <port> <model> <folder>
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlscale.config import LoraConfig
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import TrainerSpec
from tests.unit.training.optimizer_ranks import BATCHES, ONE_RANK
from tests.unit.training.ranks import TWO_RANKS
from tests.unit.training.rollouts import plan, spec

LORA = LoraConfig(rank=4, alpha=8)


def lora_spec(model_path: str, **changes: Any) -> TrainerSpec:
    # A large eps, or Adam would make full steps of the rounding of vanishing gradients.
    return spec(model_path, **{"lora": LORA, "lr": 1e-2, "adam_eps": 1e-4, **changes})


def run(model_path: str, *, rank: int, world_size: int, folder: Path) -> tuple[list[float], FsdpBackend]:
    """Norms of the gradients of three steps; the trainer is saved before the last one."""
    cut = TWO_RANKS if world_size == 2 else ONE_RANK
    trainer = FsdpBackend(lora_spec(model_path), rank=rank, world_size=world_size)
    norms = []
    for i, batch in enumerate(BATCHES):
        if i == 2:
            trainer.save(folder)
        norms.append(trainer.train(batch, [plan(batch, cut)]).steps[0]["grad_norm"])
    return norms, trainer


def main(rank: int, port: int, model_path: str, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    norms, trainer = run(model_path, rank=rank, world_size=2, folder=folder / "saved")
    final = {name: weight.clone() for name, weight in trainer.weights()}
    trainer.export_hf(folder / "hf")
    resumed = FsdpBackend(lora_spec(model_path), rank=rank, world_size=2)
    resumed.load(folder / "saved")
    resumed.train(BATCHES[2], [plan(BATCHES[2], TWO_RANKS)])
    same = all(torch.equal(weight, final[name]) for name, weight in resumed.weights())
    (folder / f"report_{rank}.json").write_text(json.dumps({"norms": norms, "resumed_exactly": same}))
    if rank == 0:
        save_file(final, folder / "final.safetensors")
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    # All that is tested is on disk. Threads of torch.distributed now and then abort an interpreter that winds down.
    os._exit(0)
