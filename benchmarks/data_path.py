"""Measures the path of a rollout from finished trajectories to the tensors of the trainer ranks.

The driver's part is what the training loop calls: `build_batch`, `check_staleness`, `plan_steps` and
`RankGroup.shared`, which stores the batch in Ray's object store. The ranks are Ray actors. Each reads the batch and
packs its micro-batches as the FSDP backend does on a CPU, without shared prompts. A token is copied three times: into
the columns (`build_batch`), into the object store (`store`), and as an index of 64 bits into a micro-batch (`pack`);
reading the store copies nothing. `samples`, which makes the samples of a trajectory, is a separate stage: the collector
calls it for each group that finishes, while others are generated. Compared, interleaved, with

    copy, columns        one memcpy, by one thread, of the token columns of the batch: 13 bytes a token
    copy, with tensors   the same of the columns and the tensors of one rank: all ranks pack at the same time
    copy, arrays         the same bytes as they lie in memory, and into written memory: `memmove` of each column of each
                         sample into the columns of the batch, and the tensors of each micro-batch to new ones
    lists                the way of other frameworks: for each rank a dictionary of lists of Python numbers, pickled
                         into the object store, and one tensor per sample and column; with fewer samples, scaled

A copy goes into new memory, or ("warm") into memory that was written before. CPU seconds are of the critical path: the
driver and the slowest rank. Medians of the rounds; ratios are of one round. Writes `results/data_path.md` and `.json`.

    python benchmarks/data_path.py [--samples 8192] [--tokens 8192] [--ranks 2] [--rounds 7] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from machine import busy_note, machine, sentence

from rlscale.cluster.rank_group import RankGroup
from rlscale.config import BatchConfig
from rlscale.control.gc_tuning import rare_full_collections
from rlscale.control.staleness import check_staleness
from rlscale.data.batch import build_batch
from rlscale.data.column_buffers import ColumnBuffers
from rlscale.data.microbatch_plan import plan_steps
from rlscale.trajectory import Trajectory
from rlscale.types import Group, Prompt, SampleStatus, StepPlan, TrainBatch

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE = 8
VOCAB_SIZE = 150_000
COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "weight_versions")
"""Columns of a batch with a value per token: 4 + 1 + 4 + 4 bytes."""

MICROBATCH_SAMPLES = 4
PIECE_BYTES = 2**28
COPY_LIMIT, LISTS_LIMIT = 2.0, 50.0
LIMITS = ("copy, with tensors", "copy, arrays")
"""Copies alone, which no path to the packed tensors can outrun by much."""


class Moment(NamedTuple):
    """A time on the clock of all processes of this machine, and the CPU time of this process, in seconds."""

    wall: float
    cpu: float


def now() -> Moment:
    return Moment(time.perf_counter(), time.process_time())


def now_in_thread() -> Moment:
    """As `now`, with the CPU time of this thread: an idle process of Ray has others that work."""
    return Moment(time.perf_counter(), time.thread_time())


def between(start: Moment, end: Moment) -> Moment:
    return Moment(end.wall - start.wall, end.cpu - start.cpu)


def add(*parts: Moment) -> Moment:
    return Moment(sum(part.wall for part in parts), sum(part.cpu for part in parts))


Round = dict[str, Moment]
"""Durations of one round by name."""


class Rank:
    """The data side of one trainer rank, as an actor of a `RankGroup`."""

    def __init__(self, rank: int) -> None:
        # Imported here: the driver of a run has no torch either.
        import torch

        from rlscale.training.cpu.allocator import keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory()
        self._rank = rank
        self._micros: list[Any] = []
        self._idle_since = now_in_thread()

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        # Ray has read the arguments before this line, in the CPU time since the last call.
        arrived = now_in_thread()
        result: dict[str, Any] = getattr(self, method)(*args)
        result["done"] = Moment(result["at"].wall, result["at"].cpu - self._idle_since.cpu)
        result["arrived"] = Moment(arrived.wall, arrived.cpu - self._idle_since.cpu)
        self._idle_since = now_in_thread()
        return result

    def take_batch(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> dict[str, Any]:
        """Packs the micro-batches of this rank."""
        import torch

        from rlscale.training.packing.microbatch import pack
        from rlscale.training.rollout_state import shared_column

        logprobs, device = shared_column(batch.rollout_logprobs), torch.device("cpu")
        mine = [samples for plan in steps for samples in plan.microbatches[self._rank]]
        self._micros = micros = [pack(batch, samples, device=device) for samples in mine]
        at = now_in_thread()
        samples = [i for each in mine for i in each]
        packed = sum(int(micro.input_ids.sum()) for micro in micros)
        assert packed == sum(int(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].sum()) for i in samples)
        assert len(logprobs) == len(batch.tokens)
        return {"at": at, "num_bytes": sum(each.nbytes for micro in micros for each in tensors_of(micro))}

    def copy_tensors(self) -> dict[str, Any]:
        """Copies the tensors of the micro-batches, one by one."""
        copies = [each.clone() for micro in self._micros for each in tensors_of(micro)]
        return {"at": now_in_thread(), "num_bytes": sum(each.nbytes for each in copies)}

    def wait(self) -> dict[str, Any]:
        """Returns once the arguments of the call before are freed: their CPU time is that of no path."""
        self._micros = []
        return {"at": now_in_thread(), "num_bytes": 0}

    def take_lists(self, columns: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
        """Makes a tensor of each list."""
        import torch

        dtypes = {"rollout_logprobs": torch.float32, "loss_mask": torch.uint8, "weight_versions": torch.int32}
        tensors = {
            name: [torch.tensor(values, dtype=dtypes.get(name, torch.int64)) for values in lists]
            for name, lists in columns.items()
        }
        at = now_in_thread()
        return {"at": at, "num_bytes": sum(each.nbytes for column in tensors.values() for each in column)}


def tensors_of(micro: Any) -> tuple[Any, ...]:
    """The columns of a micro-batch that have a value per token."""
    layout = micro.layout
    return (
        *(micro.input_ids, micro.position_ids, micro.logit_rows, micro.targets),
        *(layout.mask_T, layout.sample_ids_T),
    )


def make_trajectories(num_samples: int, num_tokens: int) -> list[list[Trajectory]]:
    """Finished trajectories by group: a sixteenth of each sample is its prompt."""
    random = np.random.default_rng(0)
    prompt_len = max(1, num_tokens // 16)
    number = num_tokens - prompt_len
    groups = []
    for index in range(num_samples // GROUP_SIZE):
        prompt = Prompt(index=index, text="", token_ids=tuple(random.integers(VOCAB_SIZE, size=prompt_len).tolist()))
        trajectories = []
        for i in range(index * GROUP_SIZE, (index + 1) * GROUP_SIZE):
            trajectory = Trajectory(id=i, group_index=index, prompt=prompt, seed=i, reward=float(i % 2))
            trajectory.extend(
                random.integers(VOCAB_SIZE, size=number, dtype=np.int32),
                logprobs=-random.random(number, dtype=np.float32),
                weight_versions=np.zeros(number, np.int32),
                sampled=True,
            )
            trajectory.status = SampleStatus.completed
            trajectories.append(trajectory)
        groups.append(trajectories)
    return groups


def make_group(trajectories: Sequence[Trajectory]) -> Group:
    """A finished group, as the collector hands it over."""
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    return Group(index=trajectories[0].group_index, prompt=trajectories[0].prompt, samples=samples)


class DataPath:
    """The driver's side of the path."""

    def __init__(self, trajectories: list[list[Trajectory]], ranks: RankGroup, options: argparse.Namespace) -> None:
        self._trajectories, self._ranks, self._num_ranks = trajectories, ranks, options.ranks
        self._config = BatchConfig(
            rollout_batch_size=len(trajectories),
            n_samples_per_prompt=GROUP_SIZE,
            global_batch_size=len(trajectories) * GROUP_SIZE,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=MICROBATCH_SAMPLES * options.tokens,
        )
        self._buffers = ColumnBuffers()  # the loop has them, too
        self.column_bytes = self.rank_bytes = 0

    async def run(self) -> Round:
        """Durations of the stages, of the path up to the columns on the ranks, and of the whole path."""
        await gather(ref for _, ref in self._ranks.calls("wait"))
        start = now()
        groups = [make_group(each) for each in self._trajectories]
        moments = [now()]
        batch = build_batch(groups, 0, buffers=self._buffers)
        moments.append(now())
        check_staleness(batch, groups, max_staleness=0)
        moments.append(now())
        steps = plan_steps(batch, self._config, num_ranks=self._num_ranks)
        moments.append(now())
        arguments = self._ranks.shared(batch), self._ranks.shared(steps)
        stored = now()
        results = await gather(ref for _, ref in self._ranks.calls("take_batch", *arguments))
        self.column_bytes = sum(getattr(batch, name).nbytes for name in COLUMNS)
        self.rank_bytes = max(result["num_bytes"] for result in results)
        names = ("build_batch", "check_staleness", "plan_steps", "store")
        pairs = pairwise([*moments, stored])
        stages = {name: between(*pair) for name, pair in zip(names, pairs, strict=True)}
        read = ends(results, "arrived", since=stored)
        whole = ends(results, "done", since=stored)
        stages |= {"read": read, "pack": between(read, whole)}
        driver, from_trajectories = between(moments[0], stored), between(start, stored)
        columns, tensors = self._copy_columns(batch, groups), await self._copy_tensors()
        return {
            "samples": between(start, moments[0]),
            **stages,
            "to the columns": add(driver, read),
            "to the tensors": add(driver, whole),
            "from trajectories to the columns": add(from_trajectories, read),
            "from trajectories to the tensors": add(from_trajectories, whole),
            "copy, arrays of columns": columns,
            "copy, arrays": add(columns, tensors),
        }

    def _copy_columns(self, batch: TrainBatch, groups: Sequence[Group]) -> Moment:
        """Copies the arrays of each sample to their places in the columns, which have the same values."""
        samples = [sample for group in groups for sample in group.samples]
        # The versions of a sample are one number: their column is copied from another array of the same length.
        versions = np.zeros(max(len(sample.weight_versions) for sample in samples), np.int32)
        pairs = []
        for sample, start, end in zip(
            samples, *(x.tolist() for x in (batch.offsets[:-1], batch.offsets[1:])), strict=True
        ):
            response = slice(start + sample.prompt_len, end)
            pairs += [
                (batch.tokens[start:end], sample.tokens),
                (batch.loss_mask[response], sample.loss_mask),
                (batch.rollout_logprobs[response], sample.rollout_logprobs),
                (batch.weight_versions[response], versions),
            ]
        copies = [(target.ctypes.data, source.ctypes.data, target.nbytes) for target, source in pairs]
        start_of_copies, copy = now(), ctypes.memmove
        for each in copies:
            copy(*each)
        return between(start_of_copies, now())

    async def _copy_tensors(self) -> Moment:
        """Each rank copies its tensors, all at the same time."""
        await gather(ref for _, ref in self._ranks.calls("copy_tensors"))  # into memory that is new
        start = now()
        return ends(await gather(ref for _, ref in self._ranks.calls("copy_tensors")), "done", since=start)


class ListPath:
    """The path of other frameworks, with the same columns and ranks."""

    def __init__(self, groups: list[Group], ranks: RankGroup, num_ranks: int) -> None:
        samples, self._ranks = [sample for group in groups for sample in group.samples], ranks
        self._columns = [
            {name: [getattr(each, name).tolist() for each in samples[rank::num_ranks]] for name in COLUMNS}
            for rank in range(num_ranks)
        ]

    async def run(self) -> Moment:
        start = now()
        refs = [ray.put(columns) for columns in self._columns]
        stored = now()
        actors = [actor for _, actor in self._ranks.named_actors]
        results = await gather(actor.call.remote("take_lists", ref) for actor, ref in zip(actors, refs, strict=True))
        return add(between(start, stored), ends(results, "done", since=stored))


async def gather(refs: Any) -> list[dict[str, Any]]:
    return await asyncio.gather(*(asyncio.wrap_future(ref.future()) for ref in refs))


def ends(results: Sequence[Mapping[str, Any]], name: str, *, since: Moment) -> Moment:
    """Duration until the slowest rank has passed a moment. Their CPU times count from the end of their last call."""
    return Moment(max(each[name].wall for each in results) - since.wall, max(each[name].cpu for each in results))


class Copies:
    """Copies by one thread, from memory that is filled, in pieces that no cache holds."""

    def __init__(self) -> None:
        self._source, self._target = np.ones(PIECE_BYTES, np.uint8), np.ones(PIECE_BYTES, np.uint8)

    def run(self, num_bytes: int, *, warm: bool) -> Moment:
        start = now()
        for first in range(0, num_bytes, len(self._source)):
            size = min(len(self._source), num_bytes - first)
            target = self._target if warm else np.empty(size, np.uint8)
            ctypes.memmove(target.ctypes.data, self._source.ctypes.data, size)
            del target
        return between(start, now())


def measure(options: argparse.Namespace) -> tuple[list[Round], dict[str, int]]:
    """Durations of every round, and bytes."""
    actor: Any = ray.remote(Rank)
    ranks = RankGroup("actor", [actor.options(num_cpus=0).remote(rank) for rank in range(options.ranks)])
    listed = [make_group(each) for each in make_trajectories(options.list_samples, options.tokens)]
    lists = ListPath(listed, ranks, options.ranks)
    # A run has no such lists: the collector of garbage would read their millions of numbers during our path.
    gc.freeze()
    ours = DataPath(make_trajectories(options.samples, options.tokens), ranks, options)
    copies, rounds = Copies(), []
    for _ in range(options.rounds + 1):
        with rare_full_collections():  # as in a run
            durations = asyncio.run(ours.run())
        durations["lists"] = asyncio.run(lists.run())
        both = ours.column_bytes + ours.rank_bytes
        for name, num_bytes in (("columns", ours.column_bytes), ("with tensors", both)):
            durations[f"copy, {name}"] = copies.run(num_bytes, warm=False)
            durations[f"copy, {name}, warm"] = copies.run(num_bytes, warm=True)
        rounds.append(durations)
    ranks.kill()
    # The first round allocates memory and imports modules.
    return rounds[1:], {"columns": ours.column_bytes, "rank": ours.rank_bytes}


def medians(rounds: Sequence[Round]) -> Round:
    return {
        name: Moment(*(statistics.median(each[name][kind] for each in rounds) for kind in range(2)))
        for name in rounds[0]
    }


def ratio(rounds: Sequence[Round], name: str, other: str, *, factor: float = 1.0) -> Moment:
    """Median over the rounds of one duration divided by another, which is multiplied by `factor`."""
    return Moment(
        *(statistics.median(each[name][kind] / (factor * each[other][kind]) for each in rounds) for kind in range(2))
    )


def summarise(rounds: Sequence[Round], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The comparisons: ratio to a copy, and the factor over lists."""
    paths = (
        ("to the columns", "columns", "arrays of columns"),
        ("to the tensors", "with tensors", "arrays"),
        ("from trajectories to the columns", "columns", "arrays of columns"),
        ("from trajectories to the tensors", "with tensors", "arrays"),
    )
    rows = [
        {"path": path, "reference": f"copy, {copy}", "ratio": ratio(rounds, path, f"copy, {copy}")._asdict()}
        for path, whole, arrays in paths
        for copy in (arrays, whole, f"{whole}, warm")
    ]
    rows.append(
        {
            "path": "to the tensors",
            "reference": "copy, columns, warm",
            "ratio": ratio(rounds, "to the tensors", "copy, columns, warm")._asdict(),
        }
    )
    scale = options.list_samples / options.samples
    for path in (*(path for path, *_ in paths), *LIMITS):
        rows.append({"path": "lists", "reference": path, "ratio": ratio(rounds, "lists", path, factor=scale)._asdict()})
    return rows


def report(rounds: Sequence[Round], num_bytes: Mapping[str, int], options: argparse.Namespace, load: float) -> str:
    typical, scale = medians(rounds), options.samples / options.list_samples
    lines = ["| stage | wall, ms | CPU, ms |", "|---|---|---|"]
    for name, duration in typical.items():
        factor, note = (scale, f", {options.list_samples} samples x {scale:g}") if name == "lists" else (1.0, "")
        lines.append(f"| {name}{note} | {1e3 * factor * duration.wall:,.0f} | {1e3 * factor * duration.cpu:,.0f} |")
    lines += ["", "| path | divided by | wall | CPU | target | met |", "|---|---|---|---|---|---|"]
    for row in summarise(rounds, options):
        values = row["ratio"].values()
        is_lists = row["path"] == "lists"
        target = f"at least {LISTS_LIMIT:g}" if is_lists else f"at most {COPY_LIMIT:g}"
        is_met = [value >= LISTS_LIMIT if is_lists else value <= COPY_LIMIT for value in values]
        met = "yes" if all(is_met) else "wall" if is_met[0] else "no"
        target, met = ("", "") if is_lists and row["reference"] in LIMITS else (target, met)
        numbers = " | ".join(f"{value:.2f}" for value in values)
        lines.append(f"| {row['path']} | {row['reference']} | {numbers} | {target} | {met} |")
    description = (__doc__ or "").split("Writes `")[0].strip().partition("\n\n")[2]
    return (
        f"# Data path\n\n{description}\n\n{sentence([load])} {options.samples:,} samples of {options.tokens:,} tokens, "
        f"{options.ranks} ranks, {len(rounds)} rounds. Columns: {num_bytes['columns'] / 1e6:.0f} MB; tensors of one "
        f"rank: {num_bytes['rank'] / 1e6:.0f} MB. {busy_note(load)}Met by `wall`: the "
        "target is met by the wall time alone. A virtual machine may take freed memory back, "
        "which makes copies into new memory slow; the path itself uses the memory of the rollout before, "
        "so that the warm copy is the strict reference. Lists end as tensors of the columns, "
        'which is where "to the columns" ends, too; packing adds positions, targets and indices in 64 bits for the '
        "model. The last two rows are what a path to the packed tensors could reach that only copies: where they are "
        "below the target, no path can meet it there. "
        f"Made by `python benchmarks/data_path.py`.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192, help="of a sample, prompt included")
    parser.add_argument("--list-samples", type=int, default=128, help="samples of the path of lists")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="writes no results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rounds, num_bytes = measure(options)
    ray.shutdown()
    text = report(rounds, num_bytes, options, load)
    sys.stdout.write(text)
    if not options.dry:
        (RESULTS / "data_path.md").write_text(text)
        content = {
            "machine": machine(),
            "load": load,
            "bytes": num_bytes,
            "comparisons": summarise(rounds, options),
            "rounds": [{name: duration._asdict() for name, duration in each.items()} for each in rounds],
        }
        (RESULTS / "data_path.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
