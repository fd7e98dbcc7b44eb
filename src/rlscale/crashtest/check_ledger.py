"""Checks of `ledger.jsonl`: every trajectory has one outcome, the same in a killed run as in another one."""

from collections.abc import Mapping
from pathlib import Path

from rlscale.observe.dumps import read_dump
from rlscale.observe.jsonl import read_records
from rlscale.rollout.ledger import OPEN, TRAINED, parse_ranges

MAX_SHOWN = 10

Outcomes = Mapping[str, frozenset[int]]
"""Outcome -> trajectories, of one rollout."""


def read_ledger(path: Path) -> dict[int, Outcomes]:
    """The pages of a ledger by rollout."""
    return {
        page["step"]: {
            outcome: frozenset(parse_ranges(ranges)) for outcome, ranges in page.items() if outcome != "step"
        }
        for page in read_records(path)
    }


def check_ledger(ledger: Path, dumps: Path) -> list[str]:
    """Faults of a ledger: trajectories with two outcomes or none, and trained ones that are not those of the dumps.

    Args:
        dumps: folder of `<rollout>.jsonl` files, the samples that were trained on.
    """
    pages = read_ledger(ledger)
    known: dict[int, str] = {}
    wrong: list[str] = []
    for rollout_id, page in sorted(pages.items()):
        for outcome, ids in sorted(page.items()):
            if outcome == OPEN:
                continue
            wrong += [f"trajectory {i} has the outcomes {known[i]} and {outcome}" for i in sorted(ids & known.keys())]
            known |= dict.fromkeys(ids, outcome)
        samples = read_dump(dumps / f"{rollout_id}.jsonl")
        trained = {sample["sample_index"] for sample in samples if sample["status"] != "failed"}
        wrong += [
            f"rollout {rollout_id}: trajectory {i} is trained in {'the dump' if i in trained else 'the ledger'} only"
            for i in sorted(trained ^ page.get(TRAINED, frozenset()))
        ]
    still_open = pages[max(pages)].get(OPEN, frozenset()) if pages else frozenset()
    lost = set(range(max(known, default=-1) + 1)) - known.keys() - still_open
    wrong += [f"trajectory {i} has no outcome" for i in sorted(lost)]
    return wrong[:MAX_SHOWN]


def compare_ledgers(unbroken: Path, broken: Path) -> list[str]:
    """Trajectories whose outcome, or the rollout of it, differs between two runs."""
    a, b = read_ledger(unbroken), read_ledger(broken)
    if a.keys() != b.keys():
        return [f"the ledger of the killed run differs in rollouts {sorted(a.keys() ^ b.keys())[:MAX_SHOWN]}"]
    differences = [
        f"ledger of rollout {rollout_id}: trajectory {i} is {_outcome_of(i, a[rollout_id])} in the uninterrupted run "
        f"and {_outcome_of(i, b[rollout_id])} in the killed run"
        for rollout_id in sorted(a)
        for i in sorted(_differing(a[rollout_id], b[rollout_id]))
    ]
    return differences[:MAX_SHOWN]


def untrained_groups(ledger: Path, *, group_size: int) -> set[int]:
    """Groups with trajectories that were dropped, that failed, or that were open when the run ended."""
    pages = read_ledger(ledger)
    ids = {
        i for page in pages.values() for outcome, group in page.items() if outcome not in (TRAINED, OPEN) for i in group
    }
    ids |= pages[max(pages)].get(OPEN, frozenset()) if pages else set()
    return {i // group_size for i in ids}


def _differing(a: Outcomes, b: Outcomes) -> set[int]:
    return {i for outcome in a.keys() | b.keys() for i in a.get(outcome, frozenset()) ^ b.get(outcome, frozenset())}


def _outcome_of(trajectory: int, page: Outcomes) -> str:
    return next((outcome for outcome, ids in page.items() if trajectory in ids), "absent")
