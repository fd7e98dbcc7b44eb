"""Upper limits of a weight transport through memory: methods to copy the same bytes from one process to another.

There is no HTTP call and no engine: only bytes, which both sides hash as in a sync. All methods run interleaved:

- memcpy: libc's, one thread, within one process, without hashing.
- ring: the method of `train.weight_channel=shared_memory` (`rlscale.weights.ring_buffer`).
- in place: the sender's memory is shared, and the receiver copies from it. Each side hashes at its own speed.
- in place, 2 threads: the same; the receiver copies with two threads.
- in place, in step: one thread; the sender is at most a few blocks ahead, so that the receiver finds them in cache.

Writes `benchmarks/results/shared_memory_ways.md` and `.json`.

    python benchmarks/shared_memory_ways.py [--millions 100 400] [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from machine import machine, sentence
from weight_limits import memcpy

from rlscale.algo.checksum import BLOCK_BYTES, Bytes, block_digest
from rlscale.weights.ring_buffer import RingReader, RingWriter

RESULTS = Path(__file__).parent / "results"
PAUSE_S = 0.05
TIMEOUT_S = 60.0
LEAD = 4
"""Max blocks by which the sender is ahead; 2 to 16 differ little."""

METHODS = ("memcpy", "ring", "in place", "in place, 2 threads", "in place, in step")
HASHED, COPIED = 0, 8
"""Indices of the two sides' block counters, each on a separate cache line."""


def allocate_shared(num_bytes: int) -> Bytes:
    """Allocates memory that a forked process shares."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def blocks(data: Bytes) -> Iterator[Bytes]:
    return (data[start : start + BLOCK_BYTES] for start in range(0, data.size, BLOCK_BYTES))


class SharedState:
    """The memory that the two processes share."""

    def __init__(self, num_bytes: int) -> None:
        self.source = allocate_shared(num_bytes)
        self.source[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), num_bytes)
        self.counts = allocate_shared(mmap.PAGESIZE).view(np.int64)

    def hash_source(self, *, in_step: bool) -> list[bytes]:
        """Sender of both methods in place."""
        digests = []
        for i, block in enumerate(blocks(self.source)):
            # One writer for each counter: a reader sees an old value at worst, and polls again.
            while in_step and i - self.counts[COPIED] >= LEAD:
                os.sched_yield()
            digests.append(block_digest(block))
            self.counts[HASHED] = i + 1
        return digests

    def copy_out_two_threads(self, target: Bytes, pool: ThreadPoolExecutor) -> list[bytes]:
        """Receiver with two threads; each copies every other block."""
        pairs = list(zip(blocks(self.source), blocks(target), strict=True))

        def copy(first: int) -> list[bytes]:
            digests = []
            for block, into in pairs[first::2]:
                into[:] = block
                digests.append(block_digest(into))
            return digests

        # Thread 0 has the even blocks, thread 1 the odd ones: block i is at i // 2 of thread i % 2.
        halves = list(pool.map(copy, (0, 1)))
        return [halves[i % 2][i // 2] for i in range(len(pairs))]

    def copy_out(self, target: Bytes, *, in_step: bool) -> list[bytes]:
        """Receiver with one thread."""
        digests = []
        for i, (block, into) in enumerate(zip(blocks(self.source), blocks(target), strict=True)):
            while in_step and self.counts[HASHED] <= i:
                os.sched_yield()
            into[:] = block
            digests.append(block_digest(into))
            self.counts[COPIED] = i + 1
        return digests


def receive(state: SharedState, ring_name: str, commands: Connection) -> None:
    """Runs the receiving process: executes methods by name and answers with the digests of the bytes that arrived."""
    ring = RingReader(ring_name, timeout_s=TIMEOUT_S)
    target = np.zeros(state.source.size, dtype=np.uint8)
    pool = ThreadPoolExecutor(2)
    methods: dict[str, Callable[[], list[bytes]]] = {
        "ring": lambda: ring.read(target)[0],
        "in place": lambda: state.copy_out(target, in_step=False),
        "in place, 2 threads": lambda: state.copy_out_two_threads(target, pool),
        "in place, in step": lambda: state.copy_out(target, in_step=True),
    }
    while (method := commands.recv()) is not None:
        commands.send(methods[method]())
    ring.close()


def measure(millions: int, repeats: int) -> dict[str, list[float]]:
    """Measures the seconds of each method, interleaved."""
    state = SharedState(millions * 4_000_000)
    ring = RingWriter(1, timeout_s=TIMEOUT_S)
    here, there = mp.Pipe()
    process = mp.get_context("fork").Process(target=receive, args=(state, ring.names[0], there), daemon=True)
    process.start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ring.accept, process.is_alive).result()

    def transfer(method: str, send: Callable[[], list[bytes]]) -> None:
        state.counts[:] = 0
        here.send(method)
        sent = send()
        assert here.recv() == sent, "the bytes that arrived must be those that were sent"

    methods: dict[str, Callable[[], object]] = {
        "memcpy": memcpy(state.source.size, num_threads=1),
        "ring": lambda: transfer("ring", lambda: ring.write(state.source)),
        "in place": lambda: transfer("in place", lambda: state.hash_source(in_step=False)),
        "in place, 2 threads": lambda: transfer("in place, 2 threads", lambda: state.hash_source(in_step=False)),
        "in place, in step": lambda: transfer("in place, in step", lambda: state.hash_source(in_step=True)),
    }
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(repeats + 2):
        for method in METHODS:
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            methods[method]()
            taken[method].append(time.perf_counter() - started)
    here.send(None)
    process.join()
    ring.close()
    # The first two rounds allocate memory and are not counted.
    return {method: seconds[2:] for method, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[100, 400], help="parameters, float32")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    lines, measured, loads = [], {}, []
    for millions in arguments.millions:
        loads.append(os.getloadavg()[0])
        measured[str(millions)] = taken = measure(millions, arguments.repeats)
        raw = statistics.median(taken["memcpy"])
        for method, seconds in taken.items():
            median = statistics.median(seconds)
            span = f"{1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f}"
            lines.append(f"| {millions}M | {method} | {1e3 * median:.1f} | {span} | {raw / median:.2f} |")
    description = __doc__.split("Writes `")[0].strip()
    text = (
        f"# Copies through shared memory\n\n{description}\n\n{sentence(loads)} Medians of {arguments.repeats}, "
        "interleaved. Written by `python benchmarks/shared_memory_ways.py`.\n\n"
        "| parameters | method | median ms | min - max ms | of memcpy |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )
    (RESULTS / "shared_memory_ways.md").write_text(text)
    (RESULTS / "shared_memory_ways.json").write_text(json.dumps({**machine(), "seconds": measured}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
