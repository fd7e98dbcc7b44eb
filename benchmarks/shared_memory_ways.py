"""What a way of weights through memory could reach at most: ways for the same bytes from one process to another.

No HTTP call and no engine: only bytes, hashed by both sides as a sync's are. In turn, in the same run:

- memcpy: libc's, one thread, within one process, of which nobody hashes anything.
- ring: as `train.weight_channel=shared_memory` does it (`rlscale.weights.ring_buffer`).
- in place: the sender's memory is shared, and the receiver copies out of it. Both hash as fast as they can.
- in place, 2 threads: the same; the receiver copies with two.
- in place, in step: with one; the sender is at most a few blocks ahead, so that the receiver finds them in the cache.

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
REST_S = 0.05
TIMEOUT_S = 60.0
LEAD = 4
"""Blocks that the sender is ahead at most; 2 to 16 differ little."""

WAYS = ("memcpy", "ring", "in place", "in place, 2 threads", "in place, in step")
HASHED, COPIED = 0, 8
"""Places of the two sides' counters of blocks, on cache lines of their own."""


def shared(num_bytes: int) -> Bytes:
    """Memory that a forked process has too."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def blocks(data: Bytes) -> Iterator[Bytes]:
    return (data[start : start + BLOCK_BYTES] for start in range(0, data.size, BLOCK_BYTES))


class Sides:
    """What the two processes share."""

    def __init__(self, num_bytes: int) -> None:
        self.source = shared(num_bytes)
        self.source[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), num_bytes)
        self.counts = shared(mmap.PAGESIZE).view(np.int64)

    def hash_source(self, *, in_step: bool) -> list[bytes]:
        """The sender's part of both ways in place."""
        digests = []
        for i, block in enumerate(blocks(self.source)):
            while in_step and i - self.counts[COPIED] >= LEAD:
                os.sched_yield()
            digests.append(block_digest(block))
            self.counts[HASHED] = i + 1
        return digests

    def copy_out_in_halves(self, target: Bytes, pool: ThreadPoolExecutor) -> list[bytes]:
        """The receiver's with two threads, each of which takes every other block."""
        pairs = list(zip(blocks(self.source), blocks(target), strict=True))

        def copy(first: int) -> list[bytes]:
            digests = []
            for block, into in pairs[first::2]:
                into[:] = block
                digests.append(block_digest(into))
            return digests

        halves = list(pool.map(copy, (0, 1)))
        return [halves[i % 2][i // 2] for i in range(len(pairs))]

    def copy_out(self, target: Bytes, *, in_step: bool) -> list[bytes]:
        """The receiver's with one."""
        digests = []
        for i, (block, into) in enumerate(zip(blocks(self.source), blocks(target), strict=True)):
            while in_step and self.counts[HASHED] <= i:
                os.sched_yield()
            into[:] = block
            digests.append(block_digest(into))
            self.counts[COPIED] = i + 1
        return digests


def receive(sides: Sides, ring_name: str, told: Connection) -> None:
    """The receiving process: does what it is told, and answers with the digests of what it then has."""
    ring = RingReader(ring_name, timeout_s=TIMEOUT_S)
    target = np.zeros(sides.source.size, dtype=np.uint8)
    pool = ThreadPoolExecutor(2)
    ways: dict[str, Callable[[], list[bytes]]] = {
        "ring": lambda: ring.read(target)[0],
        "in place": lambda: sides.copy_out(target, in_step=False),
        "in place, 2 threads": lambda: sides.copy_out_in_halves(target, pool),
        "in place, in step": lambda: sides.copy_out(target, in_step=True),
    }
    while (way := told.recv()) is not None:
        told.send(ways[way]())
    ring.close()


def measure(millions: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, in turn."""
    sides = Sides(millions * 4_000_000)
    ring = RingWriter(1, timeout_s=TIMEOUT_S)
    here, there = mp.Pipe()
    process = mp.get_context("fork").Process(target=receive, args=(sides, ring.names[0], there), daemon=True)
    process.start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ring.accept, process.is_alive).result()

    def transfer(way: str, send: Callable[[], list[bytes]]) -> None:
        sides.counts[:] = 0
        here.send(way)
        sent = send()
        assert here.recv() == sent, "what arrived must be what was sent"

    ways: dict[str, Callable[[], object]] = {
        "memcpy": memcpy(sides.source.size, num_threads=1),
        "ring": lambda: transfer("ring", lambda: ring.write(sides.source)),
        "in place": lambda: transfer("in place", lambda: sides.hash_source(in_step=False)),
        "in place, 2 threads": lambda: transfer("in place, 2 threads", lambda: sides.hash_source(in_step=False)),
        "in place, in step": lambda: transfer("in place, in step", lambda: sides.hash_source(in_step=True)),
    }
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats + 2):
        for way in WAYS:
            time.sleep(REST_S)
            began = time.perf_counter()
            ways[way]()
            taken[way].append(time.perf_counter() - began)
    here.send(None)
    process.join()
    ring.close()
    return {way: seconds[2:] for way, seconds in taken.items()}


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
        for way, seconds in taken.items():
            median = statistics.median(seconds)
            span = f"{1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f}"
            lines.append(f"| {millions}M | {way} | {1e3 * median:.1f} | {span} | {raw / median:.2f} |")
    about = __doc__.split("Writes `")[0].strip()
    text = (
        f"# Ways through memory\n\n{about}\n\n{sentence(loads)} Medians of {arguments.repeats}, in turn. "
        "Made by `python benchmarks/shared_memory_ways.py`.\n\n"
        "| parameters | way | median ms | min - max ms | of memcpy |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    (RESULTS / "shared_memory_ways.md").write_text(text)
    (RESULTS / "shared_memory_ways.json").write_text(json.dumps({**machine(), "seconds": measured}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
