"""Program of the two ranks of `test_loss_shards.py`.

python -m tests.ranks.training.loss_shards <rank> <port> <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rlscale.config import AlgoConfig
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.packing.context_parallel import ContextGroup, Span, TokenShard, zigzag
from tests.property.test_objective import ALGORITHMS, Rollout, advantages, make_rollout, share_of

LENGTHS = [4, 0, 3, 6, 1, 5]
PARTS = [[0, 3], [1, 4], [2, 5]]  # samples of each micro-batch; in one of them a rank has no token


def rollout() -> Rollout:
    made = make_rollout(LENGTHS, seed=3, trainable=0.8)
    # Samples 2 and 3 are one trajectory, so they have one group and one reward.
    made.trajectory_ids = torch.tensor([0, 1, 2, 2, 4, 5])
    made.group_ids = torch.tensor([0, 0, 1, 1, 0, 1])
    made.rewards = made.rewards[made.trajectory_ids]
    return made


def own_tokens(made: Rollout, *, rank: int) -> Tensor:
    """Token rows of one rank: every sample is divided into zigzag chunks."""
    starts = torch.tensor([0, *made.lengths]).cumsum(0).tolist()
    own = []
    for sample, length in enumerate(made.lengths):
        for owner, span in zigzag(Span(sample=sample, start=0, stop=length), num_ranks=2):
            own += [starts[sample] + t for t in range(span.start, span.stop) if owner == rank]
    return torch.tensor(own, dtype=torch.int64)


def shard_of(made: Rollout, part: list[int], *, rank: int) -> TokenShard:
    """The rank's share of a micro-batch."""
    rows = made.rows(part)
    place = {int(row): i for i, row in enumerate(rows)}
    owned = [[place[int(t)] for t in own_tokens(made, rank=each) if int(t) in place] for each in range(2)]
    most = max(1, *map(len, owned))
    order = torch.zeros(len(rows), dtype=torch.int64)
    for each, places in enumerate(owned):
        order[places] = each * most + torch.arange(len(places))
    context = ContextGroup(index=rank, size=2, group=dist.group.WORLD)
    return TokenShard(context=context, own=torch.tensor(owned[rank], dtype=torch.int64), order=order, max_entries=most)


def sharded(name: str, made: Rollout, *, rank: int) -> tuple[Tensor, Tensor]:
    """The loss of the step and the gradient at this rank's tokens, 0 elsewhere. A rank has only its own logprobs."""
    advantages_T = advantages(AlgoConfig(**ALGORITHMS[name]), made)
    mine = {key: torch.zeros_like(made.columns[key]).requires_grad_() for key in ("lp", "entropy")}
    own = own_tokens(made, rank=rank)
    for key, column in mine.items():
        column.data[own] = made.columns[key][own]
    total = torch.zeros((), dtype=torch.float64)
    for part in PARTS:
        rows, shard = made.rows(part), shard_of(made, part, rank=rank)
        gathered = {}
        for key, column in mine.items():
            entries = column[rows[shard.own]] if len(shard.own) else column[:1] * 0
            gathered[key] = torch.zeros_like(column).index_put((rows,), shard.gather(entries))
        share, _ = share_of(name, made, part, **gathered, advantages_T=advantages_T)
        share.backward()
        total = total + share.detach()
    gradients = [column.grad for column in mine.values() if column.grad is not None]
    return total, torch.stack(gradients).sum(dim=0)


def main(rank: int, port: int, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    made, found = rollout(), {}
    for name in ALGORITHMS:
        found[f"{name}.loss"], found[f"{name}.gradient"] = sharded(name, made, rank=rank)
    save_file(found, folder / f"rank_{rank}.safetensors")
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
