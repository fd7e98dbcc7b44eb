"""The report of a crash test, as Markdown and as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlscale.crashtest.player import Kill, Outcome
from rlscale.crashtest.victims import Victim


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a crash test found. `differences` is None where a run of this config need not repeat bit for bit."""

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
        """All kills made, the run came to its end, nothing differs, no sample lost or used twice."""
        complete = self.outcome.failure is None and len(self.outcome.kills) == self.num_planned
        return complete and not self.differences and not self.sample_faults


def write_report(verdict: Verdict, folder: Path, name: str) -> Path:
    """Writes `<name>.md` and `<name>.json` and returns the first."""
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
        f"{outcome.num_starts} starts of the driver; {outcome.seconds:.0f} s, the unbroken run "
        f"{verdict.unbroken_s:.0f} s.",
        "",
        *_findings(verdict),
        "",
        "| killed | times | back after, median s | back after, most s | all processes gone after, most s |",
        "|---|---|---|---|---|",
        *(_row(victim, [k for k in outcome.kills if k.victim == victim]) for victim in Victim if _has(outcome, victim)),
        "",
        '"Back" is the first metrics record after the kill; kills that were followed by another one before are not '
        "counted in it.",
    ]
    return "\n".join(lines) + "\n"


def _findings(verdict: Verdict) -> list[str]:
    found = []
    if verdict.outcome.failure is not None:
        found.append(f"- The run did not come to its end: {verdict.outcome.failure}")
    elif len(verdict.outcome.kills) < verdict.num_planned:
        found.append("- The run was over before all kills were made: give it more rollouts, or --gap a smaller range.")
    if verdict.differences is None:
        found.append("- Metrics were not compared: with staleness or this engine runs do not repeat bit for bit.")
    elif verdict.differences:
        found += [f"- {line}" for line in verdict.differences]
    else:
        found.append(f"- All {verdict.num_records} metrics records are equal to the unbroken run's, to the last bit.")
    found += [f"- {line}" for line in verdict.sample_faults]
    if not verdict.sample_faults:
        found.append("- Every group of samples was trained on once, none was lost, none was older than allowed.")
    return found


def _has(outcome: Outcome, victim: Victim) -> bool:
    return any(kill.victim == victim for kill in outcome.kills)


def _row(victim: Victim, kills: Sequence[Kill]) -> str:
    back = [kill.back_s for kill in kills if kill.back_s is not None]
    clean = [kill.clean_s for kill in kills if kill.clean_s is not None]
    shown = [
        f"{statistics.median(back):.1f}" if back else "-",
        f"{max(back):.1f}" if back else "-",
        f"{max(clean):.1f}" if clean else "-",
    ]
    return f"| {victim} | {len(kills)} | {' | '.join(shown)} |"
