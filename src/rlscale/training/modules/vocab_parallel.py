"""Output layer whose vocabulary is split over the ranks of a group (tensor parallelism)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from rlscale.algo.linear_logprobs import VocabShard


def make_vocab_shard(group: dist.ProcessGroup | dist.ProcessGroupGloo, *, first: int) -> VocabShard:
    """Builds the reductions with which `logprobs_from_hidden` works on a part of the vocabulary.

    The forward pass all-reduces [T] twice over the group, the backward pass [T, H] once.

    Args:
        group: the ranks of the parts; all of them call `logprobs_from_hidden` and its backward pass.
        first: token id of this rank's first row of the output layer.
    """

    def reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        group.allreduce([tensor], options).wait()  # type: ignore[union-attr]

    return VocabShard(
        first=first,
        reduce_max=lambda tensor: reduce(tensor, dist.ReduceOp.MAX),
        reduce_sum=lambda tensor: reduce(tensor, dist.ReduceOp.SUM),
    )
