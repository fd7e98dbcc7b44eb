"""Plans the optimiser steps of a batch and the micro-batches of every rank."""

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig
from rlscale.data.bin_packing import karmarkar_karp
from rlscale.data.prefix_tree import PrefixTree, build_prefix_tree, mix_routes
from rlscale.data.step_sizes import StepSizes
from rlscale.types import StepPlan, TrainBatch

Microbatches = list[list[int]]


def plan_steps(
    batch: TrainBatch,
    config: BatchConfig,
    *,
    num_ranks: int,
    context_ranks: int = 1,
    cost: ForwardCost | None = None,
    shares_prefixes: bool = False,
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

    With `shares_prefixes` tokens and FLOPs are those of the trees of the samples: a prefix counts once in a
    micro-batch, and trees are only split where they do not fit or where that balances the ranks.

    Args:
        batch: the rollout to train on.
        config: the config group, resolved.
        num_ranks: data-parallel ranks.
        context_ranks: context-parallel ranks; a micro-batch holds `batch.max_tokens_per_gpu` tokens times this.
        cost: of the model; required with `batch.balance_data`.
        shares_prefixes: the trainer computes a prefix once for all samples of a micro-batch.
    """
    lengths, steps = batch.lengths, []
    trainable = batch.num_trainable
    for samples in _steps(batch.trajectory_ids, config.global_batch_size or batch.num_samples):
        assert cost is not None or not config.balance_data, "batch.balance_data needs the cost of the model"
        sizes = StepSizes(
            lengths[samples],
            trainable[samples],
            cost=cost if config.balance_data else None,
            tree=_tree(batch, samples) if shares_prefixes else None,
        )
        ids = samples.tolist()
        ranks = _rank_microbatches(sizes, config, num_ranks=num_ranks, context_ranks=context_ranks)
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


def _tree(batch: TrainBatch, samples: npt.NDArray[np.intp]) -> PrefixTree:
    """Common prefixes of the samples of a step."""
    starts, prompt_lens = batch.offsets[:-1][samples], batch.prompt_lens[samples].astype(np.int64)
    keys = batch.tokens if batch.routes is None else mix_routes(batch.tokens, batch.routes)
    return build_prefix_tree(keys, starts, batch.lengths[samples], prompt_lens)


def _rank_microbatches(
    sizes: StepSizes, config: BatchConfig, *, num_ranks: int, context_ranks: int
) -> list[Microbatches]:
    """The micro-batches of every rank, in equal number."""
    indices = list(range(len(sizes.lengths)))
    if not config.use_dynamic_batch_size:
        whole = [indices[i : i + config.micro_batch_size] for i in range(0, len(indices), config.micro_batch_size)]
        _split(whole, sizes, number=-(-len(whole) // num_ranks) * num_ranks)
        return _distribute(whole, sizes, num_ranks, by_work=config.balance_data)
    assert config.max_tokens_per_gpu is not None, "a rule requires batch.max_tokens_per_gpu"
    capacity = config.max_tokens_per_gpu * context_ranks
    if config.balance_data:
        # Ranks first: packing first would fix which samples share a rank before loads are known.
        return _pack_ranks(sizes.assign(num_ranks=num_ranks), sizes, capacity)
    whole = sizes.pack(indices, capacity=capacity)
    _split(whole, sizes, number=-(-len(whole) // num_ranks) * num_ranks)
    return _distribute(whole, sizes, num_ranks, by_work=False)


def _scoring_microbatches(
    ranks: Sequence[Microbatches], sizes: StepSizes, config: BatchConfig, context_ranks: int
) -> list[Microbatches] | None:
    """The same samples on the same ranks, in micro-batches for passes without gradient; None if equal."""
    limit = config.log_probs_max_tokens_per_gpu
    if not config.use_dynamic_batch_size or limit is None or limit == config.max_tokens_per_gpu:
        return None
    shares = [sorted(i for micro in rank for i in micro) for rank in ranks]
    return _pack_ranks(shares, sizes, limit * context_ranks)


def _pack_ranks(shares: Iterable[Sequence[int]], sizes: StepSizes, capacity: int) -> list[Microbatches]:
    """Packs each rank's samples into micro-batches of at most `capacity` tokens; in equal number, at least one."""
    ranks = [sizes.pack(share, capacity=capacity) for share in shares]
    number = max(1, *map(len, ranks))
    for rank in ranks:
        _split(rank, sizes, number=number)
        rank.sort(key=lambda micro: -sizes.tokens(micro))
    return ranks


def _split(microbatches: Microbatches, sizes: StepSizes, *, number: int) -> None:
    """Halves the largest micro-batches, then adds empty ones, until there are `number`."""
    if len(microbatches) == number:
        return
    # A heap of the micro-batches that can be split, largest first; single samples cannot.
    heap = [(-sizes.tokens(micro), place) for place, micro in enumerate(microbatches) if len(micro) > 1]
    heapq.heapify(heap)
    while heap and len(microbatches) < number:
        _, place = heapq.heappop(heap)
        halves = sizes.halves(microbatches[place])
        microbatches[place] = halves[0]
        microbatches.append(halves[1])
        for half_place in (place, len(microbatches) - 1):
            half = microbatches[half_place]
            if len(half) > 1:
                heapq.heappush(heap, (-sizes.tokens(half), half_place))
    microbatches += [[] for _ in range(number - len(microbatches))]


def _distribute(microbatches: Microbatches, sizes: StepSizes, num_ranks: int, *, by_work: bool) -> list[Microbatches]:
    """Assigns the same number of micro-batches to each rank, sorted by decreasing tokens: round-robin, or by FLOPs."""
    ordered = sorted(microbatches, key=lambda micro: -sizes.tokens(micro))
    if not by_work:
        return [ordered[rank::num_ranks] for rank in range(num_ranks)]
    costs = [sizes.costs(micro) for micro in ordered]
    return [[ordered[i] for i in sorted(picked)] for picked in karmarkar_karp(costs, num_bins=num_ranks)]


def _with_sample_ids(ranks: Sequence[Microbatches], ids: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Replaces indices into the step by indices into the batch."""
    return tuple(tuple(tuple(map(ids.__getitem__, sorted(micro))) for micro in rank) for rank in ranks)
