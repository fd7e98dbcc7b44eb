"""Growth of the memory of each process of a long run: the arithmetic and the page of `soak.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

LIMIT = 0.02
"""Largest growth of a process of ours, as a share of its memory after the warm-up."""

MIN_SAMPLES = 3
"""Samples that a window needs."""

WINDOW_SHARE = 0.1
"""Share of the measured steps in each of the two windows."""

NUM_PARTS = 10
OURS: Mapping[str, str] = {
    "_PolicyActor": "trainer rank",
    "_EngineActor": "engine actor",
    "rlscale.cli.serve": "engine",
    "rlscale.gateway.serve_gateway": "gateway",
    "reward_child": "reward process",
    "process_reaper": "reaper",
}
"""Processes of ours by a part of their command line."""

RAY = "Ray: "


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Anonymous memory of every process of the run at one time."""

    seconds: float  # since the start of the command
    steps: int
    memory: Mapping[str, int]  # name of the process -> bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Memory of one process in both windows; None: it did not live for half of the window."""

    name: str
    first: float | None  # bytes, median
    last: float | None

    @property
    def is_ours(self) -> bool:
        return not self.name.startswith(RAY)

    @property
    def share(self) -> float | None:
        return None if self.first is None or self.last is None else self.last / self.first - 1


def describe_process(pid: int, command: str, *, driver: int) -> str:
    """Part that a process has in the run. Ray's own processes start with `RAY`."""
    if pid == driver:
        return "driver"
    for part, name in OURS.items():
        if part in command:
            return name
    first = next((word for word in command.split() if "/ray/" in word), None)
    if first is not None or command.startswith("ray"):
        return RAY + (command.split()[0].removeprefix("ray::") if first is None else PurePath(first).stem)
    return "other"


def windows(samples: Sequence[MemorySample], *, warmup: int) -> tuple[list[MemorySample], list[MemorySample]]:
    """Samples of the first and of the last tenth of the steps after the warm-up; empty lists if there are too few."""
    measured = [sample for sample in samples if sample.steps >= warmup]
    if not measured:
        return [], []
    end = measured[-1].steps
    size = (end - warmup) * WINDOW_SHARE
    first = [sample for sample in measured if sample.steps <= warmup + size]
    last = [sample for sample in measured if sample.steps >= end - size]
    overlap = first[-1].steps >= last[0].steps if first else True
    return ([], []) if overlap or min(len(first), len(last)) < MIN_SAMPLES else (first, last)


def growths(samples: Sequence[MemorySample], *, warmup: int) -> list[Growth]:
    """Growth of every process that lived for half of one window, ours first."""
    first, last = windows(samples, warmup=warmup)
    names = dict.fromkeys(name for sample in (*first, *last) for name in sample.memory)
    found = [Growth(name=name, first=_median(first, name), last=_median(last, name)) for name in names]
    lived = [each for each in found if each.first is not None or each.last is not None]
    return sorted(lived, key=lambda each: not each.is_ours)


def _median(window: Sequence[MemorySample], name: str) -> float | None:
    values = [sample.memory[name] for sample in window if name in sample.memory]
    return statistics.median(values) if 2 * len(values) >= len(window) else None


def find_faults(found: Sequence[Growth]) -> list[str]:
    """Reasons why the limit does not hold. A process that was replaced has no growth, so it is a fault, too."""
    if not found:
        return ["there are too few samples after the warm-up"]
    faults = []
    for each in found:
        if not each.is_ours:
            continue
        if each.share is None:
            faults.append(f"{each.name} {'ended' if each.last is None else 'began'} during the measured steps")
        elif each.share > LIMIT:
            faults.append(f"{each.name} grew by {each.share:.1%}")
    return faults


def parts(samples: Sequence[MemorySample]) -> Iterator[tuple[list[MemorySample], float]]:
    """The samples of each tenth of the steps, and its steps/s."""
    if not samples:
        return
    end = max(1, samples[-1].steps)
    for number in range(NUM_PARTS):
        low, high = end * number / NUM_PARTS, end * (number + 1) / NUM_PARTS
        chosen = [sample for sample in samples if low <= sample.steps <= high]
        if len(chosen) > 1 and chosen[-1].seconds > chosen[0].seconds:
            seconds = chosen[-1].seconds - chosen[0].seconds
            yield chosen, (chosen[-1].steps - chosen[0].steps) / seconds


def growth_table(found: Sequence[Growth]) -> str:
    """Memory of each process in both windows."""
    lines = ["| process | after the warm-up, MB | at the end, MB | growth |", "|---|---|---|---|"]
    for each in found:
        share = "-" if each.share is None else f"{each.share:+.2%}"
        lines.append(f"| {each.name} | {_megabytes(each.first)} | {_megabytes(each.last)} | {share} |")
    return "\n".join(lines)


def part_table(samples: Sequence[MemorySample], names: Sequence[str]) -> str:
    """Steps/s and the memory of some processes over the run."""
    lines = [
        "| steps | steps/s | " + " | ".join(f"{name}, MB" for name in names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for chosen, rate in parts(samples):
        memory = " | ".join(_megabytes(_median(chosen, name)) for name in names)
        lines.append(f"| to {chosen[-1].steps:,} | {rate:.1f} | {memory} |")
    return "\n".join(lines)


def _megabytes(number: float | None) -> str:
    return "-" if number is None else f"{number / 1e6:.1f}"
