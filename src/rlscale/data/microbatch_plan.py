"""From a batch to optimiser steps, from a step to the micro-batches of every rank."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rlscale.config import BatchConfig
from rlscale.data.bin_packing import divide_evenly, first_fit_decreasing
from rlscale.data.load_balance import flops, spread_over_ranks
from rlscale.types import StepPlan, TrainBatch

Microbatches = list[list[int]]


def plan_steps(
    batch: TrainBatch, config: BatchConfig, *, num_ranks: int, context_ranks: int = 1, hidden_size: int = 4096
) -> list[StepPlan]:
    """One plan for each optimiser step; together they hold every sample of the batch exactly once.

    Steps take `batch.global_batch_size` trajectories each, in batch order; a last step with fewer is kept, and
    its loss is the mean over what it has. Within a step there are three ways:

        samples ── micro_batch_size at a time ──> micro-batches ── in turn, or by FLOPs ──> ranks
        samples ── first-fit-decreasing ────────> micro-batches ── in turn ───────────────> ranks
        samples ── by tokens and FLOPs ─────────> ranks ── first-fit-decreasing on each ──> micro-batches

    the last one with `batch.use_dynamic_batch_size` and `batch.balance_data`. A micro-batch is split rather than a rank
    left with fewer; where even that is not possible (fewer samples than ranks), ranks get empty ones, so that all have
    equally many. The micro-batches of a rank come in order of decreasing tokens, so that ranks in step are alike.

    Args:
        batch: what is trained on.
        config: the group of the config, resolved.
        num_ranks: data-parallel ranks.
        context_ranks: ranks that share a sample; a micro-batch holds as many times `batch.max_tokens_per_gpu`.
        hidden_size: width of the model; weighs attention against the rest in the estimate of FLOPs.
    """
    lengths, steps = batch.lengths, []
    trainable = _num_trainable(batch)
    for samples in _steps(batch.trajectory_ids, config.global_batch_size or batch.num_samples):
        sizes, ids = lengths[samples].tolist(), samples.tolist()
        ranks = _over_ranks(sizes, config, num_ranks, context_ranks, hidden_size)
        scoring = _for_scoring(ranks, sizes, config, context_ranks)
        has_tokens = trainable[samples] > 0
        steps.append(
            StepPlan(
                microbatches=_named(ranks, ids),
                scoring=None if scoring is None else _named(scoring, ids),
                num_trajectories=_num_distinct(batch.trajectory_ids[samples][has_tokens]),
                num_tokens=int(trainable[samples].sum()),
            )
        )
    return steps


def _num_trainable(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """Trainable tokens of each sample. [S]

    `np.add.reduceat` would first copy the mask in a wider type, which costs more than all the rest of a schedule.
    """
    ends = batch.offsets.tolist()
    counts = [np.count_nonzero(batch.loss_mask[start:end]) for start, end in pairwise(ends)]
    return np.asarray(counts, dtype=np.int64)


def _steps(trajectory_ids: npt.NDArray[np.int64], per_step: int) -> list[npt.NDArray[np.intp]]:
    """Sample indices of each step; the samples of one trajectory stay together."""
    _, first, inverse = np.unique(trajectory_ids, return_index=True, return_inverse=True)
    step_of_trajectory = np.argsort(np.argsort(first)) // per_step
    step_of_sample = step_of_trajectory[inverse]
    ends = np.cumsum(np.bincount(step_of_sample))
    return np.split(np.argsort(step_of_sample, kind="stable"), ends[:-1])


def _num_distinct(ids: npt.NDArray[np.int64]) -> int:
    """Faster than `np.unique`, which makes a table of hashes where no more than the values is asked for."""
    return int(np.count_nonzero(np.diff(np.sort(ids)))) + bool(len(ids))


def _over_ranks(
    sizes: Sequence[int], config: BatchConfig, num_ranks: int, context_ranks: int, hidden_size: int
) -> list[Microbatches]:
    """The micro-batches of every rank, equally many."""
    if not config.use_dynamic_batch_size:
        indices = list(range(len(sizes)))
        whole = [indices[i : i + config.micro_batch_size] for i in range(0, len(indices), config.micro_batch_size)]
        _split(whole, sizes, number=-(-len(whole) // num_ranks) * num_ranks)
        return _dealt(whole, sizes, num_ranks, hidden_size if config.balance_data else None)
    assert config.max_tokens_per_gpu is not None, "a rule asks for batch.max_tokens_per_gpu"
    capacity = config.max_tokens_per_gpu * context_ranks
    if config.balance_data:
        shares = spread_over_ranks(sizes, num_ranks=num_ranks, hidden_size=hidden_size)
        return _packed(shares, sizes, capacity)
    whole = first_fit_decreasing(sizes, capacity=capacity)
    _split(whole, sizes, number=-(-len(whole) // num_ranks) * num_ranks)
    return _dealt(whole, sizes, num_ranks, None)


def _for_scoring(
    ranks: Sequence[Microbatches], sizes: Sequence[int], config: BatchConfig, context_ranks: int
) -> list[Microbatches] | None:
    """The same samples on the same ranks, in micro-batches of their own size; None where that is the same size."""
    limit = config.log_probs_max_tokens_per_gpu
    if not config.use_dynamic_batch_size or limit is None or limit == config.max_tokens_per_gpu:
        return None
    shares = [sorted(i for micro in rank for i in micro) for rank in ranks]
    return _packed(shares, sizes, limit * context_ranks)


def _packed(shares: Iterable[Sequence[int]], sizes: Sequence[int], capacity: int) -> list[Microbatches]:
    """Micro-batches of at most `capacity` tokens of each rank's samples; equally many, at least one."""
    ranks = []
    for share in shares:
        bins = first_fit_decreasing([sizes[i] for i in share], capacity=capacity)
        ranks.append([[share[i] for i in each] for each in bins])
    number = max(1, *map(len, ranks))
    for rank in ranks:
        _split(rank, sizes, number=number)
        rank.sort(key=lambda micro: -_tokens(micro, sizes))
    return ranks


def _split(microbatches: Microbatches, sizes: Sequence[int], *, number: int) -> None:
    """Splits the largest micro-batches in halves, and then adds empty ones, until there are `number`."""
    if len(microbatches) == number:
        return
    heap = [(-_tokens(micro, sizes), place) for place, micro in enumerate(microbatches) if len(micro) > 1]
    heapq.heapify(heap)
    while heap and len(microbatches) < number:
        _, place = heapq.heappop(heap)
        whole = microbatches[place]
        halves = [[whole[i] for i in half] for half in divide_evenly([sizes[i] for i in whole], num_bins=2)]
        microbatches[place] = halves[0]
        microbatches.append(halves[1])
        for half_place in (place, len(microbatches) - 1):
            half = microbatches[half_place]
            if len(half) > 1:
                heapq.heappush(heap, (-_tokens(half, sizes), half_place))
    microbatches += [[] for _ in range(number - len(microbatches))]


def _dealt(
    microbatches: Microbatches, sizes: Sequence[int], num_ranks: int, hidden_size: int | None
) -> list[Microbatches]:
    """Gives each rank equally many micro-batches, in order of decreasing tokens.

    `hidden_size` None deals them out in turn; else their estimated FLOPs are balanced.
    """
    ordered = sorted(microbatches, key=lambda micro: -_tokens(micro, sizes))
    if hidden_size is None:
        return [ordered[rank::num_ranks] for rank in range(num_ranks)]
    work = flops(np.asarray(sizes, dtype=np.int64), hidden_size=hidden_size).tolist()
    costs = [_tokens(micro, work) for micro in ordered]
    return [[ordered[i] for i in sorted(chosen)] for chosen in divide_evenly(costs, num_bins=num_ranks)]


def _tokens(micro: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(map(sizes.__getitem__, micro))


def _named(ranks: Sequence[Microbatches], ids: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The same with indices into the batch."""
    return tuple(tuple(tuple(map(ids.__getitem__, sorted(micro))) for micro in rank) for rank in ranks)
