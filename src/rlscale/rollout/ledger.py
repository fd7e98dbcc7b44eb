"""Ledger: one outcome for each trajectory of a run.

    opened ─┬─> trained
            ├─> dropped   by the filter that dropped its group
            ├─> failed    by the cause of its failure
            └─> open      it waits, or is generated: the ledger of a later rollout has its outcome

Each rollout is one line of `ledger.jsonl` in the run folder. A run that resumes from a checkpoint continues after the
line of its last rollout, and trajectories that were open in the checkpoint are still open.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlscale.errors import CheckError

TRAINED, OPEN = "trained", "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerPage:
    """Outcomes that were decided since the page before, and the trajectories that are still open."""

    rollout_id: int
    outcomes: Mapping[str, tuple[int, ...]]  # "trained", "dropped/<filter>", "failed/<cause>", "open" -> trajectory ids

    @property
    def counts(self) -> dict[str, int]:
        return {outcome: len(ids) for outcome, ids in self.outcomes.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON values; ids as ranges: `"0-15"`, `"17"`."""
        return {"step": self.rollout_id, **{outcome: _ranges(ids) for outcome, ids in self.outcomes.items()}}


class Ledger:
    """Outcomes of trajectories. Called by the event loop alone.

    Invariants: a trajectory is opened before it gets an outcome, and gets one outcome; an open one is held by the
    buffer or by a rollout (`check_open`, at the end of each step).

    Example:
        ledger.open([0, 1, 2, 3])
        ledger.record("failed/grader", [3])
        ledger.record("trained", [0, 1, 2])
        ledger.check_open([])
        page = ledger.close_page(rollout_id=0)
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._outcomes: dict[str, list[int]] = {}

    def open(self, ids: Iterable[int]) -> None:
        """Adds trajectories; one that is open already, e.g. in the buffer, stays open."""
        self._open.update(ids)

    def record(self, outcome: str, ids: Collection[int]) -> None:
        """Gives trajectories their outcome.

        Raises:
            CheckError: one has an outcome already, or was never opened.
        """
        unknown = [each for each in ids if each not in self._open]
        if unknown or len(set(ids)) < len(ids):
            shown = unknown or sorted(ids)
            raise CheckError(f"ledger: trajectories must get one outcome each, got {outcome!r} again for {shown[:10]}")
        self._open.difference_update(ids)
        if ids:
            self._outcomes.setdefault(outcome, []).extend(ids)

    def check_open(self, pending: Iterable[int]) -> None:
        """Compares the open trajectories with those that wait or are generated: none is lost.

        Raises:
            CheckError: a trajectory without an outcome is nowhere, or one with an outcome still waits.
        """
        found = set(pending)
        if found == self._open:
            return
        lost, decided = sorted(self._open - found), sorted(found - self._open)
        texts = [f"{len(lost)} that are in no rollout and not in the buffer: {lost[:10]}"] if lost else []
        texts += [f"{len(decided)} that wait although they have an outcome: {decided[:10]}"] if decided else []
        raise CheckError(
            f"ledger: trajectories without an outcome must wait or be generated, got {' and '.join(texts)}; a function "
            "of the user must not remove samples from a group: a filter returns its verdict"
        )

    def close_page(self, rollout_id: int) -> LedgerPage:
        """Returns the outcomes since the page before, and begins the next page."""
        outcomes = {outcome: tuple(sorted(ids)) for outcome, ids in sorted(self._outcomes.items())}
        self._outcomes = {}
        return LedgerPage(rollout_id=rollout_id, outcomes={**outcomes, OPEN: tuple(sorted(self._open))})


def _ranges(ids: Iterable[int]) -> list[str]:
    """Sorted ids as ranges of consecutive numbers."""
    ranges: list[list[int]] = []
    for each in ids:
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def parse_ranges(ranges: Iterable[str]) -> Iterator[int]:
    """The ids of a line of the ledger: `["0-2", "7"]` as 0, 1, 2, 7."""
    for each in ranges:
        first, _, last = each.partition("-")
        yield from range(int(first), int(last or first) + 1)


def outcome_metrics(page: LedgerPage) -> dict[str, float]:
    """Numbers of trajectories by outcome, and the share of failed ones among those with an outcome.

    Omits outcomes that no trajectory had, and those of a rollout in which all were trained.
    """
    counts = {outcome: number for outcome, number in page.counts.items() if number}
    pending = counts.pop(OPEN, 0)
    if set(counts) <= {TRAINED} and not pending:
        return {}
    num_failed = sum(number for outcome, number in counts.items() if outcome.startswith("failed/"))
    metrics = {f"trajectories/{outcome}": float(number) for outcome, number in counts.items()}
    metrics |= {"trajectories/open": float(pending)}
    return metrics | {"trajectories/failed_share": num_failed / max(1, sum(counts.values()))}
