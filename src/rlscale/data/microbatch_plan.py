"""Plans the optimiser steps of a batch and the micro-batches of every rank."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig
from rlscale.data.bin_packing import first_fit_decreasing, karmarkar_karp
from rlscale.data.load_balance import assign_to_ranks, sample_work
from rlscale.types import Int64, StepPlan, TrainBatch

Microbatches = list[list[int]]


def plan_steps(
    batch: TrainBatch,
    config: BatchConfig,
    *,
    num_ranks: int,
    context_ranks: int = 1,
    cost: ForwardCost | None = None,
) -> list[StepPlan]:
    """Plans each optimiser step; together the plans contain every sample of the batch exactly once.

    Steps take `batch.global_batch_size` trajectories each, in batch order; a last step with fewer is kept, and
    its loss is the mean over its trajectories. Within a step there are three ways:

        samples ── micro_batch_size at a time ──> micro-batches ── round-robin, or by FLOPs ──> ranks
        samples ── first-fit-decreasing ────────> micro-batches ── round-robin ───────────────> ranks
        samples ── by tokens and FLOPs ─────────> ranks ── first-fit-decreasing on each ──> micro-batches

    the last one with `batch.use_dynamic_batch_size` and `batch.balance_data`. All ranks get the same number of
    micro-batches: large ones are split, and with fewer samples than ranks some are empty. The micro-batches of a rank
    are sorted by decreasing tokens, so that concurrent ones of different ranks are similar.

    Args:
        batch: the rollout to train on.
        config: the config group, resolved.
        num_ranks: data-parallel ranks.
        context_ranks: context-parallel ranks; a micro-batch holds `batch.max_tokens_per_gpu` tokens times this.
        cost: of the model; required with `batch.balance_data`.
    """
    lengths, steps = batch.lengths, []
    trainable = _num_trainable(batch)
    for samples in _steps(batch.trajectory_ids, config.global_batch_size or batch.num_samples):
        sizes, ids = lengths[samples].tolist(), samples.tolist()
        work = _work(lengths[samples], trainable[samples], config, cost)
        ranks = _rank_microbatches(sizes, work, config, num_ranks=num_ranks, context_ranks=context_ranks)
        scoring = _scoring_microbatches(ranks, sizes, config, context_ranks)
        has_tokens = trainable[samples] > 0
        steps.append(
            StepPlan(
                microbatches=_with_sample_ids(ranks, ids),
                scoring=None if scoring is None else _with_sample_ids(scoring, ids),
                num_trajectories=_num_distinct(batch.trajectory_ids[samples][has_tokens]),
                num_tokens=int(trainable[samples].sum()),
            )
        )
    return steps


def _num_trainable(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """Trainable tokens of each sample. [S]

    `np.add.reduceat` would first copy the mask to a wider type, which costs more than the rest of the plan.
    """
    ends = batch.offsets.tolist()
    counts = [np.count_nonzero(batch.loss_mask[start:end]) for start, end in pairwise(ends)]
    return np.asarray(counts, dtype=np.int64)


def _steps(trajectory_ids: npt.NDArray[np.int64], per_step: int) -> list[npt.NDArray[np.intp]]:
    """Sample indices of each step; the samples of one trajectory stay together."""
    _, first, inverse = np.unique(trajectory_ids, return_index=True, return_inverse=True)
    # argsort of argsort is the rank of each trajectory by first occurrence.
    step_of_trajectory = np.argsort(np.argsort(first)) // per_step
    step_of_sample = step_of_trajectory[inverse]
    ends = np.cumsum(np.bincount(step_of_sample))
    return np.split(np.argsort(step_of_sample, kind="stable"), ends[:-1])


def _num_distinct(ids: npt.NDArray[np.int64]) -> int:
    """Number of distinct ids; faster than `np.unique`, which builds a hash table."""
    return int(np.count_nonzero(np.diff(np.sort(ids)))) + bool(len(ids))


def _work(lengths_S: Int64, trainable_S: Int64, config: BatchConfig, cost: ForwardCost | None) -> list[int] | None:
    """FLOPs of each sample, up to a factor; None: they are not balanced."""
    if not config.balance_data:
        return None
    assert cost is not None, "batch.balance_data needs the cost of the model"
    work: list[int] = sample_work(lengths_S, trainable_S, cost).tolist()
    return work


def _rank_microbatches(
    sizes: Sequence[int], work: Sequence[int] | None, config: BatchConfig, *, num_ranks: int, context_ranks: int
) -> list[Microbatches]:
    """The micro-batches of every rank, in equal number."""
    if not config.use_dynamic_batch_size:
        indices = list(range(len(sizes)))
        whole = [indices[i : i + config.micro_batch_size] for i in range(0, len(indices), config.micro_batch_size)]
        _split(whole, sizes, number=-(-len(whole) // num_ranks) * num_ranks)
        return _distribute(whole, sizes, num_ranks, work)
    assert config.max_tokens_per_gpu is not None, "a rule requires batch.max_tokens_per_gpu"
    capacity = config.max_tokens_per_gpu * context_ranks
    if work is not None:
        # Ranks first: packing first would fix which samples share a rank before loads are known.
        shares = assign_to_ranks(sizes, work, num_ranks=num_ranks)
        return _pack_ranks(shares, sizes, capacity)
    whole = first_fit_decreasing(sizes, capacity=capacity)
    _split(whole, sizes, number=-(-len(whole) // num_ranks) * num_ranks)
    return _distribute(whole, sizes, num_ranks, None)


def _scoring_microbatches(
    ranks: Sequence[Microbatches], sizes: Sequence[int], config: BatchConfig, context_ranks: int
) -> list[Microbatches] | None:
    """The same samples on the same ranks, in micro-batches for passes without gradient; None if equal."""
    limit = config.log_probs_max_tokens_per_gpu
    if not config.use_dynamic_batch_size or limit is None or limit == config.max_tokens_per_gpu:
        return None
    shares = [sorted(i for micro in rank for i in micro) for rank in ranks]
    return _pack_ranks(shares, sizes, limit * context_ranks)


def _pack_ranks(shares: Iterable[Sequence[int]], sizes: Sequence[int], capacity: int) -> list[Microbatches]:
    """Packs each rank's samples into micro-batches of at most `capacity` tokens; in equal number, at least one."""
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
    """Halves the largest micro-batches, then adds empty ones, until there are `number`."""
    if len(microbatches) == number:
        return
    # A heap of the micro-batches that can be split, largest first; single samples cannot.
    heap = [(-_tokens(micro, sizes), place) for place, micro in enumerate(microbatches) if len(micro) > 1]
    heapq.heapify(heap)
    while heap and len(microbatches) < number:
        _, place = heapq.heappop(heap)
        whole = microbatches[place]
        halves = [[whole[i] for i in half] for half in karmarkar_karp([sizes[i] for i in whole], num_bins=2)]
        microbatches[place] = halves[0]
        microbatches.append(halves[1])
        for half_place in (place, len(microbatches) - 1):
            half = microbatches[half_place]
            if len(half) > 1:
                heapq.heappush(heap, (-_tokens(half, sizes), half_place))
    microbatches += [[] for _ in range(number - len(microbatches))]


def _distribute(
    microbatches: Microbatches, sizes: Sequence[int], num_ranks: int, work: Sequence[int] | None
) -> list[Microbatches]:
    """Assigns the same number of micro-batches to each rank, sorted by decreasing tokens.

    `work` None: round-robin; else by these FLOPs of the samples.
    """
    ordered = sorted(microbatches, key=lambda micro: -_tokens(micro, sizes))
    if work is None:
        return [ordered[rank::num_ranks] for rank in range(num_ranks)]
    costs = [_tokens(micro, work) for micro in ordered]
    return [[ordered[i] for i in sorted(picked)] for picked in karmarkar_karp(costs, num_bins=num_ranks)]


def _tokens(micro: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(map(sizes.__getitem__, micro))


def _with_sample_ids(ranks: Sequence[Microbatches], ids: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Replaces indices into the step by indices into the batch."""
    return tuple(tuple(tuple(map(ids.__getitem__, sorted(micro))) for micro in rank) for rank in ranks)
