"""Summary of a finished run."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Result of a run. None: not available in this run."""

    title: str
    reward_before: float | None  # mean held-out reward before the first rollout
    reward_after: float | None
    num_steps: int  # in this start
    num_tokens: int  # response tokens in this start
    seconds: float
    run_dir: Path
    checkpoint: Path | None
    hf_folder: Path | None
    metrics_file: Path
    num_steps_before: int = 0  # by earlier starts
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    trajectories: str | None = None  # their outcomes, if some were not trained on
    warnings: Sequence[str] = ()
    next_commands: Sequence[tuple[str, str]] = ()  # (command, description)


def print_summary(summary: RunSummary, *, stream: TextIO | None = None) -> None:
    """Prints the summary, in a frame on a terminal, else as plain lines. Never cuts or wraps paths and commands.

    Args:
        stream: None is standard output.
    """
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        _print_frame(summary, Console(file=stream))
    else:
        stream.write("\n".join(_plain_lines(summary)) + "\n")
        stream.flush()


def phase_seconds(records: Sequence[Mapping[str, float]], phases: Sequence[str]) -> dict[str, float]:
    """Seconds by phase over the records of a metrics file. Skips phases without time."""
    sums = {phase: sum(float(record.get(f"time/{phase}_s", 0.0)) for record in records) for phase in phases}
    return {phase: seconds for phase, seconds in sums.items() if seconds > 0}


def _print_frame(summary: RunSummary, console: Console) -> None:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in _facts(summary):
        facts.add_row(label, Text(value, style="bold green" if label == _REWARD else ""))
    # Names of folders may have brackets, which rich takes for markup in plain strings.
    title = Text(summary.title, style="bold")
    console.print(Panel(Group(facts), title=title, title_align="left", border_style="green"))
    # Below the frame, so that a long path or command can be copied whole.
    for label, value in _paths(summary):
        console.print(Text.assemble((f"{label:<12}", "dim"), " ", value), soft_wrap=True)
    for line in _warnings(summary):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    if summary.next_commands:
        console.print("\n[bold]Next steps[/]")
    for command, meaning in summary.next_commands:
        console.print(Text(f"  # {meaning}", style="dim"), soft_wrap=True)
        console.print(Text(f"  {command}", style="cyan"), soft_wrap=True)


def _plain_lines(summary: RunSummary) -> Iterator[str]:
    yield f"== {summary.title}"
    for label, value in [*_facts(summary), *_paths(summary)]:
        yield f"{label:<16} {value}"
    yield from _warnings(summary)
    if summary.next_commands:
        yield "next steps"
    for command, meaning in summary.next_commands:
        yield f"  # {meaning}"
        yield f"  {command}"


_REWARD = "held-out reward"


def _facts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.reward_before is not None or summary.reward_after is not None:
        yield _REWARD, f"{_reward(summary.reward_before)} before, {_reward(summary.reward_after)} after"
    before = f", after {summary.num_steps_before:,} in earlier starts" if summary.num_steps_before else ""
    yield "steps", f"{summary.num_steps:,} in {summary.seconds:.1f} s{before}"
    rate = summary.num_tokens / summary.seconds if summary.seconds > 0 else 0.0
    yield "tokens", f"{summary.num_tokens:,}, {rate:,.0f} tokens/s"
    if summary.trajectories is not None:
        yield "trajectories", summary.trajectories
    total = sum(summary.seconds_by_phase.values())
    if total > 0:
        parts = (f"{name} {s:.1f} s ({100 * s / total:.0f}%)" for name, s in summary.seconds_by_phase.items())
        yield "time by phase", ", ".join(parts)


def _paths(summary: RunSummary) -> Iterator[tuple[str, str]]:
    yield "run folder", str(summary.run_dir)
    if summary.checkpoint is not None:
        yield "checkpoint", str(summary.checkpoint)
    if summary.hf_folder is not None:
        yield "model", str(summary.hf_folder)
    yield "metrics", str(summary.metrics_file)


def _warnings(summary: RunSummary) -> Iterator[str]:
    return (f"warning: {text}" for text in summary.warnings)


def _reward(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
