"""Comparison of a killed run with an unbroken one, and checks of the samples of any run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlscale.observe.dumps import read_dump
from rlscale.observe.jsonl import read_records

NOT_COMPARED = ("time", "throughput/", "memory/")
"""Prefixes of metrics that depend on the machine, not on the run."""

MAX_SHOWN = 10


def compare_metrics(unbroken: Path, broken: Path) -> list[str]:
    """Numbers that differ between two metrics files, to the last bit; without times, throughput and memory."""
    a, b = (_without_timings(read_records(path)) for path in (unbroken, broken))
    steps = [[record["step"] for record in records] for records in (a, b)]
    if steps[0] != steps[1]:
        missing = sorted((Counter(steps[0]) - Counter(steps[1])).elements())
        surplus = sorted((Counter(steps[1]) - Counter(steps[0])).elements())
        # `Counter` subtraction keeps repeated steps: a doubled record is surplus, too.
        return [f"the broken run lacks the records of steps {missing} and has {surplus} in excess"]
    differences = [
        f"step {x['step']}: {name} is {x.get(name)!r} unbroken and {y.get(name)!r} broken"
        for x, y in zip(a, b, strict=True)
        for name in sorted(x.keys() | y.keys())
        if x.get(name) != y.get(name)
    ]
    return _first_lines(differences)


def check_samples(dumps: Path, *, num_groups: int, max_staleness: int) -> list[str]:
    """Faults of the samples that were trained on: groups lost, used twice, or too old.

    Args:
        dumps: folder of `<rollout>.jsonl` files.
        num_groups: groups of one rollout.
    """
    rollouts = sorted(dumps.glob("*.jsonl"), key=lambda path: int(path.stem))
    wrong = []
    if [int(path.stem) for path in rollouts] != list(range(len(rollouts))):
        wrong.append(f"rollouts 0 to {len(rollouts) - 1} must all exist, got {[path.stem for path in rollouts]}")
    used: Counter[int] = Counter()
    for path in rollouts:
        samples = read_dump(path)
        used.update({sample["group_index"] for sample in samples})
        wrong += _find_stale(samples, path.stem, max_staleness)
    # Indices of groups count over the whole run, `num_groups` a rollout.
    lost = set(range(len(rollouts) * num_groups)) - used.keys()
    wrong += [f"group {index} was never trained on" for index in sorted(lost)]
    wrong += [f"group {index} was trained on {times} times" for index, times in sorted(used.items()) if times > 1]
    return _first_lines(wrong)


def compare_prompts(unbroken: Path, broken: Path) -> list[str]:
    """Groups whose prompts differ between two folders of dumps."""
    a, b = (_prompts(folder) for folder in (unbroken, broken))
    return _first_lines([f"group {i} has another prompt" for i in sorted(a.keys() & b.keys()) if a[i] != b[i]])


def _prompts(dumps: Path) -> dict[int, int]:
    return {s["group_index"]: s["prompt_index"] for path in dumps.glob("*.jsonl") for s in read_dump(path)}


def _find_stale(samples: Sequence[dict[str, Any]], rollout: str, max_staleness: int) -> list[str]:
    wrong = []
    for sample in samples:
        columns = zip(sample["weight_versions"], sample["loss_mask"], strict=True)
        oldest = min((version for version, trainable in columns if trainable), default=None)
        if oldest is not None and sample["version"] - oldest > max_staleness:
            wrong.append(
                f"rollout {rollout}: sample {sample['sample_index']} was made by version {oldest} and trained on at "
                f"version {sample['version']}"
            )
    return wrong


def _without_timings(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith(NOT_COMPARED)} for record in records]


def _first_lines(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_SHOWN
    return lines if more <= 0 else [*lines[:MAX_SHOWN], f"and {more} more"]
