"""From a batch to optimiser steps, from a step to the micro-batches of every rank."""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlscale.config import BatchConfig
from rlscale.data.partition import divide_evenly, first_fit_decreasing
from rlscale.types import StepPlan, TrainBatch

Microbatches = list[list[int]]


def plan_steps(batch: TrainBatch, config: BatchConfig, *, num_ranks: int, hidden_size: int = 4096) -> list[StepPlan]:
    """One plan for each optimiser step; together they hold every sample of the batch exactly once.

    Steps take `batch.global_batch_size` executions each, in the order of the batch; a last step with fewer is kept, and
    its loss is the mean over what it has. Within a step:

        samples ── first-fit-decreasing, or micro_batch_size at a time ──> micro-batches ──> ranks

    A micro-batch is split rather than a rank left without one; where even that is not possible (fewer samples than
    ranks), ranks get empty ones, so that all have equally many.

    Args:
        batch: what is trained on.
        config: the group of the config, resolved.
        num_ranks: data-parallel ranks.
        hidden_size: width of the model; weighs attention against the rest in the estimate of FLOPs.
    """
    lengths, steps = batch.lengths, []
    trainable = np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int32)
    for samples in _steps(batch.execution_ids, config.global_batch_size or batch.num_samples):
        sizes, ids = lengths[samples].tolist(), samples.tolist()
        microbatches = _microbatches(sizes, config)
        _fill_ranks(microbatches, sizes, num_ranks)
        ranks = _deal(microbatches, sizes, num_ranks, hidden_size if config.balance_data else None)
        has_tokens = trainable[samples] > 0
        steps.append(
            StepPlan(
                microbatches=tuple(
                    tuple(tuple(map(ids.__getitem__, sorted(micro))) for micro in rank) for rank in ranks
                ),
                num_executions=len(np.unique(batch.execution_ids[samples][has_tokens])),
                num_tokens=int(trainable[samples].sum()),
            )
        )
    return steps


def _steps(execution_ids: npt.NDArray[np.int64], per_step: int) -> list[npt.NDArray[np.intp]]:
    """Sample indices of each step; the samples of one execution stay together."""
    _, first, inverse = np.unique(execution_ids, return_index=True, return_inverse=True)
    step_of_execution = np.argsort(np.argsort(first)) // per_step
    step_of_sample = step_of_execution[inverse]
    ends = np.cumsum(np.bincount(step_of_sample))
    return np.split(np.argsort(step_of_sample, kind="stable"), ends[:-1])


def _microbatches(sizes: Sequence[int], config: BatchConfig) -> Microbatches:
    if not config.use_dynamic_batch_size:
        indices = list(range(len(sizes)))
        return [indices[i : i + config.micro_batch_size] for i in range(0, len(indices), config.micro_batch_size)]
    assert config.max_tokens_per_gpu is not None, "a rule asks for batch.max_tokens_per_gpu"
    return first_fit_decreasing(sizes, capacity=config.max_tokens_per_gpu)


def _fill_ranks(microbatches: Microbatches, sizes: Sequence[int], num_ranks: int) -> None:
    """Splits the largest micro-batches in halves, and then adds empty ones, until every rank can have equally many."""
    heap = [
        (-sum(map(sizes.__getitem__, micro)), number) for number, micro in enumerate(microbatches) if len(micro) > 1
    ]
    heapq.heapify(heap)
    while heap and len(microbatches) % num_ranks:
        _, number = heapq.heappop(heap)
        whole = microbatches[number]
        halves = [[whole[i] for i in half] for half in divide_evenly([sizes[i] for i in whole], num_bins=2)]
        microbatches[number] = halves[0]
        microbatches.append(halves[1])
        for half_number in (number, len(microbatches) - 1):
            half = microbatches[half_number]
            if len(half) > 1:
                heapq.heappush(heap, (-sum(sizes[i] for i in half), half_number))
    microbatches += [[] for _ in range(-len(microbatches) % num_ranks)]


def _deal(
    microbatches: Microbatches, sizes: Sequence[int], num_ranks: int, hidden_size: int | None
) -> list[Microbatches]:
    """Gives each rank equally many micro-batches, in order of decreasing tokens, so that ranks in step are alike.

    `hidden_size` None deals them out in turn; else their estimated FLOPs are balanced.
    """
    ordered = sorted(microbatches, key=lambda m: -sum(map(sizes.__getitem__, m)))
    if hidden_size is None:
        return [ordered[rank::num_ranks] for rank in range(num_ranks)]
    flops = [_flops(size, hidden_size) for size in sizes]
    costs = [sum(map(flops.__getitem__, m)) for m in ordered]
    return [[ordered[i] for i in sorted(chosen)] for chosen in divide_evenly(costs, num_bins=num_ranks)]


def _flops(length: int, hidden_size: int) -> int:
    """Work of one sample up to a factor: 24 h^2 L in the linear layers and 2 h L^2 in causal attention, by 2 h."""
    return length * (12 * hidden_size + length)
