"""Outcomes of trajectories: one each, those of the dumps, and the same in a killed run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rlscale.crashtest.check_ledger import check_ledger, compare_ledgers, untrained_groups
from rlscale.observe.dumps import RolloutDump
from rlscale.observe.step_lines import StepLines
from rlscale.rollout.ledger import Ledger
from rlscale.types import Group, Prompt, Sample


def ledger(path: Path, *pages: Mapping[str, Sequence[int]]) -> Path:
    """The file of pages `outcome -> trajectories`; "open" opens them for a later page."""
    writer, lines = Ledger(), StepLines(path, resume_at_step=0)
    for rollout_id, page in enumerate(pages):
        writer.open(i for ids in page.values() for i in ids)
        for outcome, ids in page.items():
            if outcome != "open":
                writer.record(outcome, ids)
        lines.append([writer.close_page(rollout_id).to_json()])
    lines.close()
    return path


def dump(folder: Path, *rollouts: Sequence[int]) -> Path:
    """Dumps of groups of two trajectories."""
    writer = RolloutDump(f"{folder}/{{rollout_id}}.jsonl")
    for rollout_id, ids in enumerate(rollouts):
        groups = []
        for index in sorted({i // 2 for i in ids}):
            prompt = Prompt(index=index, text="a", token_ids=(1,))
            samples = [Sample(index=i, group_index=index, prompt=prompt, seed=0) for i in ids if i // 2 == index]
            for sample in samples:
                sample.append([2], logprobs=[-1.0], weight_versions=[0])
            groups.append(Group(index=index, prompt=prompt, samples=samples))
        writer.write(rollout_id, groups, version=0)
    return folder


Page = Mapping[str, Sequence[str]]

PAGES: tuple[Mapping[str, Sequence[int]], ...] = (
    {"trained": [0, 1, 4], "failed/grader": [5], "dropped/equal_rewards": [2, 3], "open": [6, 7]},
    {"trained": [6, 7, 8, 9], "open": [10, 11]},
)
DUMPS = ([0, 1, 4], [6, 7, 8, 9])


def test_one_outcome_each_has_no_fault(tmp_path: Path) -> None:
    path = ledger(tmp_path / "ledger.jsonl", *PAGES)
    assert check_ledger(path, dump(tmp_path / "dumps", *DUMPS)) == []
    assert untrained_groups(path, group_size=2) == {1, 2, 5}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"trained": ["0-1"]}, {"trained": ["1-2"]}, "1 has the outcomes trained and trained"),
        ({"trained": ["0-1"]}, {"trained": ["2-3"]}, "rollout 1: trajectory 3 is trained in the ledger only"),
        ({"trained": ["0"]}, {"trained": ["1-2"]}, "rollout 0: trajectory 1 is trained in the dump only"),
        ({"trained": ["0-1"]}, {"dropped/f": ["2"], "trained": ["4"]}, "trajectory 3 has no outcome"),
    ],
)
def test_faults_are_reported(tmp_path: Path, first: Page, second: Page, message: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps({"step": i, **page}) + "\n" for i, page in enumerate((first, second))))
    assert any(message in line for line in check_ledger(path, dump(tmp_path / "dumps", [0, 1], [2])))


def test_a_killed_run_has_the_outcomes_of_the_other_one(tmp_path: Path) -> None:
    a = ledger(tmp_path / "a.jsonl", *PAGES)
    assert compare_ledgers(a, ledger(tmp_path / "b.jsonl", *PAGES)) == []
    other = {**PAGES[0], "trained": [0, 1], "failed/grader": [4, 5]}
    assert compare_ledgers(a, ledger(tmp_path / "c.jsonl", other, PAGES[1])) == [
        "ledger of rollout 0: trajectory 4 is trained in the uninterrupted run and failed/grader in the killed run"
    ]
    assert compare_ledgers(a, ledger(tmp_path / "d.jsonl", PAGES[0])) == [
        "the ledger of the killed run differs in rollouts [1]"
    ]
