"""MFU of training: the operations that a model needs, compared with the rate of its devices."""

from __future__ import annotations

import numpy as np

from rlscale.architectures.architecture import ForwardCost
from rlscale.types import TrainBatch, TrainResult

BACKWARD = 2
"""Forward passes that a backward pass costs. Operations that are computed again do not count."""


def utilization(
    batch: TrainBatch, result: TrainResult, *, cost: ForwardCost | None, num_ranks: int
) -> dict[str, float]:
    """`throughput/train_tflops` of one rank and `throughput/mfu`, its share of the rank's rate.

    The time is that of forward and backward passes and optimiser steps; passes that only score do not count. Empty for
    a model whose operations are not known, and where the policy was not trained.

    Args:
        cost: operations of the policy's forward pass.
        num_ranks: ranks that share the work.
    """
    seconds = result.seconds.get("optimize", 0.0)
    if cost is None or not seconds:
        return {}
    flops = (1 + BACKWARD) * forward_flops(batch, cost) * result.num_epochs / seconds / num_ranks
    metrics = {"throughput/train_tflops": flops / 1e12}
    if result.device_flops:
        metrics |= {
            "throughput/device_tflops": result.device_flops / 1e12,
            "throughput/mfu": flops / result.device_flops,
        }
    return metrics


def forward_flops(batch: TrainBatch, cost: ForwardCost) -> float:
    """Operations of a forward pass over all samples, each with its prompt. A token attends to those before it."""
    lengths = batch.lengths.astype(np.float64)
    pairs = sum(map(cost.count_pairs, lengths.tolist()))
    return float(
        cost.per_token * lengths.sum() + cost.per_pair * pairs + cost.per_logit_row * int(batch.loss_mask.sum())
    )
