"""Program of the two ranks of `test_checkpoint_errors.py`: saves and loads where one file of rank 1 is broken.

python -m tests.ranks.training.checkpoint_error_ranks <rank> <port> <model> <folder>
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import CriticSpec, ModelSource
from tests.unit.training.rollouts import spec

TIMEOUT_S = 60.0
NAMES = ("state", "tensors", "header", "save", "critic")
"""What is broken: the random state of rank 1, its tensors, trainer.json, and files that it or rank 0 cannot write."""


def error(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as found:
        return f"{type(found).__name__}: {found}"
    return ""


def break_file(path: Path, *, rank: int) -> None:
    """Puts a folder in the place of a file, so that it can be neither read nor written."""
    if rank == 0:
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    dist.barrier()


def main(rank: int, port: int, model: str, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", TIMEOUT_S)
    critic = CriticSpec(source=ModelSource(path=model), lr=1e-3)
    backend = FsdpBackend(spec(model, algo={"advantage_estimator": "ppo"}, critic=critic), rank=rank, world_size=2)
    for name in NAMES:
        if rank == 0:
            (folder / name).mkdir()
    dist.barrier()
    for name in ("state", "tensors", "header"):
        backend.save(folder / name)
    found = {}
    break_file(folder / "state" / "random" / "rank_1.json", rank=rank)
    found["state"] = error(lambda: backend.load(folder / "state"))
    if rank == 0:  # its header stays whole
        file = sorted((folder / "tensors" / "tensors").glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:-100])
    dist.barrier()
    found["tensors"] = error(lambda: backend.load(folder / "tensors"))
    break_file(folder / "header" / "trainer.json", rank=rank)
    found["header"] = error(lambda: backend.load(folder / "header"))
    break_file(folder / "save" / "random" / "rank_1.json", rank=rank)
    found["save"] = error(lambda: backend.save(folder / "save"))
    if rank == 0:
        (folder / "critic" / "critic").write_text("not a folder")
    dist.barrier()
    found["critic"] = error(lambda: backend.save(folder / "critic"))
    (folder / f"report_{rank}.json").write_text(json.dumps(found))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
