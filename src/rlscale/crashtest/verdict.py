"""The report of a crash test, as Markdown and as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlscale.crashtest.kill_runner import Kill, Outcome
from rlscale.crashtest.victims import Victim


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a crash test. `differences` is None where runs of this config need not be equal bit for bit."""

    command: str
    machine: str
    unbroken_s: float
    outcome: Outcome
    num_planned: int
    differences: list[str] | None
    sample_faults: list[str]
    num_records: int

    @property
    def passed(self) -> bool:
        """Whether all kills happened, the run finished, nothing differs, and no sample was lost or used twice."""
        complete = self.outcome.failure is None and len(self.outcome.kills) == self.num_planned
        return complete and not self.differences and not self.sample_faults


def write_report(verdict: Verdict, folder: Path, name: str) -> Path:
    """Writes `<name>.md` and `<name>.json`, and returns the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(verdict) | {"passed": verdict.passed}, indent=2) + "\n")
    path = folder / f"{name}.md"
    path.write_text(to_markdown(verdict))
    return path


def to_markdown(verdict: Verdict) -> str:
    outcome = verdict.outcome
    lines = [
        f"# Crash test: {'passed' if verdict.passed else 'FAILED'}",
        "",
        f"`{verdict.command}`",
        "",
        f"{verdict.machine}. {len(outcome.kills)} of {verdict.num_planned} planned kills (SIGKILL), "
        f"{outcome.num_starts} starts of the driver; {outcome.seconds:.0f} s, the uninterrupted run "
        f"{verdict.unbroken_s:.0f} s.",
        "",
        *_findings(verdict),
        "",
        "| killed | times | recovered after, median s | recovered after, max s | all processes gone after, max s |",
        "|---|---|---|---|---|",
        *(_row(victim, [k for k in outcome.kills if k.victim == victim]) for victim in Victim if _has(outcome, victim)),
        "",
        '"Recovered" is the time from the kill to the next metrics record. A kill that is followed by another kill '
        "before that record is not counted.",
    ]
    return "\n".join(lines) + "\n"


def _findings(verdict: Verdict) -> list[str]:
    found = []
    if verdict.outcome.failure is not None:
        found.append(f"- The run did not finish: {verdict.outcome.failure}")
    elif len(verdict.outcome.kills) < verdict.num_planned:
        found.append(
            "- The run finished before all kills were made: use more rollouts, fewer --kills or a smaller --gap."
        )
    if verdict.differences is None:
        found.append("- Metrics were not compared: runs with staleness, or with this engine, are not bit-identical.")
    elif verdict.differences:
        found += [f"- {line}" for line in verdict.differences]
    else:
        found.append(f"- All {verdict.num_records} metrics records equal those of the uninterrupted run bit for bit.")
    found += [f"- {line}" for line in verdict.sample_faults]
    if not verdict.sample_faults:
        found.append("- Every group was trained on once; none was lost or older than allowed.")
    return found


def _has(outcome: Outcome, victim: Victim) -> bool:
    return any(kill.victim == victim for kill in outcome.kills)


def _row(victim: Victim, kills: Sequence[Kill]) -> str:
    recovered = [kill.recovered_s for kill in kills if kill.recovered_s is not None]
    # Only the kill of a driver has the time until all its processes are gone.
    gone = [kill.gone_s for kill in kills if kill.gone_s is not None]
    shown = [
        f"{statistics.median(recovered):.1f}" if recovered else "-",
        f"{max(recovered):.1f}" if recovered else "-",
        f"{max(gone):.1f}" if gone else "-",
    ]
    return f"| {victim} | {len(kills)} | {' | '.join(shown)} |"
