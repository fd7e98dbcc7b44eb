"""Assigns a step of 100,000 samples with long-tailed lengths to 8, 64 and 1,024 ranks: time and balance of the ranks.

Compares `plan_steps` as a run calls it (`batch.use_dynamic_batch_size`, `batch.balance_data`) with two simple methods.
All pack the samples of each rank by first-fit-decreasing:

    Karmarkar-Karp   the differencing method on estimated FLOPs, with any number of samples per rank
    round-robin      in the order of the batch

The balance is the largest rank divided by the mean, in tokens and in estimated FLOPs. Lengths are lognormal, cut at the
maximum; no sample is longer than a micro-batch. Methods run interleaved; times are medians of the rounds. Also times
`build_batch`. Writes `results/schedule.md` and `.json`.

    python benchmarks/schedule.py [--samples 100000] [--ranks 8 64 1024] [--rounds 5]
"""

import argparse
import heapq
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, sentence
from simulation import QWEN3_4B

from rlscale.config import BatchConfig
from rlscale.data.batch import build_batch
from rlscale.data.bin_packing import first_fit_decreasing
from rlscale.data.load_balance import sample_work
from rlscale.data.microbatch_plan import plan_steps
from rlscale.types import Group, Int64, Prompt, Sample, SampleStatus, TrainBatch

RESULTS = Path(__file__).parent / "results"
MAX_TOKENS = 32_768
RATIO_LIMIT, TIME_LIMIT_S = 1.02, 1.0
COLUMN_SAMPLES = 10_000

Shares = Sequence[Sequence[int]]
"""Samples by rank."""


def long_tailed(number: int) -> Int64:
    """Lengths: half below 900 tokens, the mean near 1,700, the longest 32,768."""
    lengths = np.random.default_rng(0).lognormal(6.8, 1.1, number).astype(np.int64) + 64
    return np.minimum(lengths, MAX_TOKENS)


def batch_of(lengths: Int64) -> TrainBatch:
    """Batch of these lengths. Columns that the schedule does not read are broadcasts of one value."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    number, num_tokens = len(lengths), int(offsets[-1])
    return TrainBatch(
        tokens=np.broadcast_to(np.zeros(1, np.int32), num_tokens),
        loss_mask=np.ones(num_tokens, np.uint8),
        rollout_logprobs=np.broadcast_to(np.zeros(1, np.float32), num_tokens),
        weight_versions=np.broadcast_to(np.zeros(1, np.int32), num_tokens),
        offsets=offsets,
        prompt_lens=np.ones(number, np.int32),
        rewards=np.zeros(number, np.float32),
        group_ids=np.arange(number),
        trajectory_ids=np.arange(number),
        version=0,
    )


def ours(batch: TrainBatch, num_ranks: int) -> Shares:
    config = BatchConfig(
        rollout_batch_size=batch.num_samples,
        global_batch_size=batch.num_samples,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=MAX_TOKENS,
        balance_data=True,
    )
    (step,) = plan_steps(batch, config, num_ranks=num_ranks, cost=QWEN3_4B)
    assert len({len(rank) for rank in step.microbatches}) == 1
    return [[i for micro in rank for i in micro] for rank in step.microbatches]


def round_robin(batch: TrainBatch, num_ranks: int) -> Shares:
    return _packed([range(rank, batch.num_samples, num_ranks) for rank in range(num_ranks)], batch)


def karmarkar_karp(batch: TrainBatch, num_ranks: int) -> Shares:
    """Starts with one partition per sample and merges the two with the largest spread, large ranks with small ones."""
    costs = sample_work(batch.lengths, batch.lengths, QWEN3_4B).tolist()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, cost in enumerate(costs):
        # Partitions omit ranks without samples: most partitions have few samples for a long time.
        heapq.heappush(heap, (-cost, i, [(cost, [i])]))
    number = len(costs)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _differenced(first, second, num_ranks)
        smallest = merged[-1][0] if len(merged) == num_ranks else 0
        number += 1
        heapq.heappush(heap, (smallest - merged[0][0], number, merged))
    shares = [samples for _, samples in heap[0][2]]
    return _packed(shares + [[]] * (num_ranks - len(shares)), batch)


def _differenced(
    first: list[tuple[int, list[int]]], second: list[tuple[int, list[int]]], num_ranks: int
) -> list[tuple[int, list[int]]]:
    """Merges the largest ranks of one partition with the smallest of the other. All are sorted by decreasing sum."""
    overlap = max(0, len(first) + len(second) - num_ranks)
    alone = first[: len(first) - overlap] + second[: len(second) - overlap]
    pairs = zip(first[len(first) - overlap :], reversed(second[len(second) - overlap :]), strict=True)
    both = [(a + b, mine + theirs) for (a, mine), (b, theirs) in pairs]
    return sorted(alone + both, key=lambda part: -part[0])


def _packed(shares: Shares, batch: TrainBatch) -> Shares:
    """Packs the samples of each rank, so that its time counts, and returns `shares`."""
    lengths = batch.lengths.tolist()
    for share in shares:
        first_fit_decreasing([lengths[i] for i in share], capacity=MAX_TOKENS)
    return shares


METHODS: dict[str, Callable[[TrainBatch, int], Shares]] = {
    "rlscale": ours,
    "Karmarkar-Karp": karmarkar_karp,
    "round-robin": round_robin,
}


def ratios(shares: Shares, lengths: Int64) -> tuple[float, float]:
    """Largest rank divided by the mean, in tokens and in FLOPs."""
    found = []
    for sizes in (lengths, sample_work(lengths, lengths, QWEN3_4B)):
        loads = [int(sizes[list(share)].sum()) for share in shares]
        found.append(max(loads) / (sum(loads) / len(loads)))
    return found[0], found[1]


def measure(batch: TrainBatch, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    balance = {}
    for _ in range(rounds):
        for name, method in METHODS.items():
            began = time.perf_counter()
            shares = method(batch, num_ranks)
            seconds[name].append(time.perf_counter() - began)
            assert sorted(i for share in shares for i in share) == list(range(batch.num_samples))
            balance[name] = ratios(shares, batch.lengths)
    return [
        {"ranks": num_ranks, "method": name, "tokens": balance[name][0], "flops": balance[name][1], "seconds": taken}
        for name, taken in seconds.items()
    ]


def columns(rounds: int) -> dict[str, Any]:
    """Time of `build_batch`."""
    lengths = long_tailed(COLUMN_SAMPLES).tolist()
    prompt = Prompt(index=0, text="", token_ids=(1,) * 32)
    groups = [Group(index=i, prompt=prompt, samples=[_sample(i, prompt, n)]) for i, n in enumerate(lengths)]
    taken, batch = [], None
    for _ in range(rounds):
        began = time.perf_counter()
        batch = build_batch(groups, 0)
        taken.append(time.perf_counter() - began)
    assert batch is not None
    names = [name for name in TrainBatch.__slots__ if isinstance(getattr(batch, name), np.ndarray)]
    num_bytes = sum(getattr(batch, name).nbytes for name in names)
    return {"samples": COLUMN_SAMPLES, "tokens": len(batch.tokens), "bytes": num_bytes, "seconds": taken}


def _sample(index: int, prompt: Prompt, length: int) -> Sample:
    sample = Sample(index=index, group_index=index, prompt=prompt, seed=0, reward=0.0, status=SampleStatus.completed)
    number = length - len(prompt.token_ids)
    sample.append([7] * number, logprobs=[-0.5] * number, weight_versions=[0] * number)
    return sample


def write(rows: list[dict[str, Any]], made: dict[str, Any], lengths: Int64, load: float) -> None:
    lines = ["| ranks | method | s | largest / mean, tokens | largest / mean, FLOPs |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['ranks']:,} | {row['method']} | {statistics.median(row['seconds']):.2f} | {row['tokens']:.4f} "
            f"| {row['flops']:.4f} |"
        )
    column_s = statistics.median(made["seconds"])
    text = (
        f"# Batching schedule\n\n{sentence([load])} {len(lengths):,} samples, {lengths.sum() / 1e6:.0f} million tokens "
        f"(mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max():,}), micro-batches of at "
        f"most {MAX_TOKENS:,} tokens, FLOPs of Qwen3-4B. Medians of {len(rows[0]['seconds'])} interleaved rounds. "
        f"Limits for rlscale: largest / mean {RATIO_LIMIT}, {TIME_LIMIT_S:.0f} s. Made by "
        "`python benchmarks/schedule.py`.\n\n"
        + "\n".join(lines)
        + "\n\nKarmarkar-Karp balances only FLOPs; ranks with the longest samples then have fewer tokens."
        f"\n\nColumns: {made['samples']:,} samples with {made['tokens'] / 1e6:.1f} million tokens become "
        f"a batch of {made['bytes'] / 1e6:.0f} MB in {column_s:.2f} s "
        f"({1e9 * column_s / made['tokens']:.0f} ns per token).\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "schedule.md").write_text(text)
    content = {"machine": machine(), "load": load, "columns": made, "cases": rows}
    (RESULTS / "schedule.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(text)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Limits that rlscale exceeds."""
    found = []
    for row in (row for row in rows if row["method"] == "rlscale"):
        worst, taken = max(row["tokens"], row["flops"]), statistics.median(row["seconds"])
        found += [f"{row['ranks']} ranks: {worst:.3f} over mean"] if worst > RATIO_LIMIT else []
        found += [f"{row['ranks']} ranks: {taken:.2f} s"] if taken > TIME_LIMIT_S else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load, lengths = os.getloadavg()[0], long_tailed(arguments.samples)
    batch = batch_of(lengths)
    rows = [row for ranks in arguments.ranks for row in measure(batch, ranks, arguments.rounds)]
    write(rows, columns(arguments.rounds), lengths, load)
    sys.exit("; ".join(failures(rows)) or 0)


if __name__ == "__main__":
    main()
