"""One rank of the check of collectives; rank 0 writes time and rates.

python -P -m rlscale.doctor.collective_rank <device> <ranks> <port> <rank> <file>
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlscale.training.distributed import find_local_ranks, join_world, leave_world, select_device
from rlscale.training.profiling.device_rate import measure_seconds

NUM_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
TIMEOUT_S = 20.0


def main(argv: Sequence[str]) -> int:
    """Runs the collectives. Returns 0, or raises on a wrong sum."""
    kind, num_ranks, port, rank, path = argv[0], int(argv[1]), int(argv[2]), int(argv[3]), Path(argv[4])
    began = time.perf_counter()
    join_world(rank, num_ranks, "127.0.0.1", port, "nccl" if kind == "cuda" else "gloo", TIMEOUT_S)
    device = select_device(kind, local_rank=find_local_ranks()[0])
    ranks = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(ranks)
    if (ranks != num_ranks * (num_ranks + 1) / 2).any():
        raise RuntimeError(f"the sum over {num_ranks} ranks must be {num_ranks * (num_ranks + 1) / 2}, got {ranks[0]}")
    # Objects go over gloo, also next to NCCL: the trainer sends metrics this way.
    names: list[int] = [0] * num_ranks
    dist.all_gather_object(names, rank)
    if names != list(range(num_ranks)):
        raise RuntimeError(f"objects of all ranks must arrive, got {names}")
    joined = time.perf_counter() - began
    data = torch.ones(NUM_BYTES[kind] // 4, device=device)
    reduce_s = measure_seconds(lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX), device=kind, repeats=2)
    broadcast_s = measure_seconds(lambda: dist.broadcast(data, src=0), device=kind, repeats=2)
    if rank == 0:
        path.write_text(f"{joined} {data.nbytes / reduce_s} {data.nbytes / broadcast_s}\n", encoding="utf-8")
    dist.barrier()
    leave_world()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
