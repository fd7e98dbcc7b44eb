"""Comparison of metrics and prompts, and faults of samples."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.crashtest.compare import check_samples, compare_metrics, compare_prompts
from rlscale.observe.dumps import RolloutDump
from rlscale.types import Group, Prompt, Sample


def metrics(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"time": 1.0, **record}) + "\n" for record in records))
    return path


def test_only_machine_dependent_numbers_may_differ(tmp_path: Path) -> None:
    a = metrics(tmp_path / "a", {"step": 0, "train/loss": 0.1, "time/step_s": 1.0, "throughput/tokens_per_s": 5.0})
    b = metrics(tmp_path / "b", {"step": 0, "train/loss": 0.1, "time/step_s": 2.0, "throughput/tokens_per_s": 9.0})
    assert compare_metrics(a, b) == []


def test_the_last_bit_counts(tmp_path: Path) -> None:
    a = metrics(tmp_path / "a", {"step": 0, "x": 1.0}, {"step": 1, "x": 0.1 + 0.2})
    b = metrics(tmp_path / "b", {"step": 0, "x": 1.0}, {"step": 1, "x": 0.3})
    assert compare_metrics(a, b) == ["step 1: x is 0.30000000000000004 unbroken and 0.3 broken"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [([0, 2], "lacks the records of steps [1] and has [] in excess"), ([0, 1, 1, 2], "has [1] in excess")],
)
def test_a_lost_or_doubled_record_is_reported(tmp_path: Path, steps: Sequence[int], message: str) -> None:
    a = metrics(tmp_path / "a", *({"step": step} for step in (0, 1, 2)))
    b = metrics(tmp_path / "b", *({"step": step} for step in steps))
    (line,) = compare_metrics(a, b)
    assert message in line


def group(index: int, *, version: int = 0, row: int | None = None) -> Group:
    prompt = Prompt(index=index if row is None else row, text="a", token_ids=(1,))
    sample = Sample(index=index, group_index=index, prompt=prompt, seed=0)
    sample.append([2, 3], logprobs=[-1.0, -2.0], weight_versions=[version, version + 1])
    return Group(index=index, prompt=prompt, samples=[sample])


def dump(folder: Path, *rollouts: tuple[Sequence[Group], int]) -> Path:
    writer = RolloutDump(f"{folder}/{{rollout_id}}.jsonl")
    for rollout_id, (groups, version) in enumerate(rollouts):
        writer.write(rollout_id, groups, version=version)
    return folder


def test_fresh_groups_used_once_have_no_fault(tmp_path: Path) -> None:
    folder = dump(tmp_path, ([group(0), group(1)], 0), ([group(2), group(3, version=0)], 1))
    assert check_samples(folder, num_groups=2, max_staleness=1) == []


def test_lost_doubled_and_stale_samples_are_reported(tmp_path: Path) -> None:
    folder = dump(tmp_path, ([group(0), group(1)], 0), ([group(1), group(3, version=0)], 2))
    assert check_samples(folder, num_groups=2, max_staleness=1) == [
        "rollout 1: sample 1 was made by version 0 and trained on at version 2",
        "rollout 1: sample 3 was made by version 0 and trained on at version 2",
        "group 2 was never trained on",
        "group 1 was trained on 2 times",
    ]


def test_another_prompt_with_the_same_index_is_reported(tmp_path: Path) -> None:
    a = dump(tmp_path / "a", ([group(0), group(1)], 0))
    b = dump(tmp_path / "b", ([group(0), group(1, row=7)], 0))
    assert compare_prompts(a, b) == ["group 1 has another prompt"]
