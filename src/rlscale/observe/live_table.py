"""Live table of a run: one screen, redrawn in place."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlscale.observe.console import Console
from rlscale.observe.metrics.metric_names import PHASES
from rlscale.protocols import Metrics

PACE_STEPS = 20
"""The estimate of the remaining time uses the median of this many steps."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_BAR_WIDTH = 20
_REDRAWS_PER_S = 4
_STANDARD = ("stdout", "stderr")


@dataclass(kw_only=True)
class RunView:
    """State of the live table. `draw` renders it without a terminal."""

    title: str
    total: int
    first_step: int = 0
    started_at: float = field(default_factory=time.monotonic)
    num_done: int = 0
    current_phase: str = "start"
    phase_since: float = field(default_factory=time.monotonic)
    latest: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    # Sums over the whole run. All phases are present from the start, because the drawing thread iterates over the dict.
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    first_eval: float | None = None

    def __post_init__(self) -> None:
        self.num_done = max(self.num_done, self.first_step)

    def phase(self, name: str) -> None:
        self.current_phase, self.phase_since = name, time.monotonic()

    def step(self, step: int, metrics: Metrics) -> None:
        self.num_done = step + 1
        self.evaluated(metrics)
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "time/step_s" in metrics:
            self.step_seconds.append(metrics["time/step_s"])
        for name in PHASES:
            self.phase_seconds[name] += metrics.get(f"time/{name}_s", 0.0)

    def evaluated(self, metrics: Metrics) -> None:
        self.latest.update(metrics)
        if self.first_eval is None:
            self.first_eval = metrics.get("eval/reward_mean")

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the last rollout. None before the first step."""
        if not self.step_seconds:
            return None
        return median(self.step_seconds[-PACE_STEPS:]) * (self.total - self.num_done)

    def draw(self) -> RenderableType:
        """Renders the whole table. It fits into 80 columns."""
        return Panel(
            Group(self._progress(), self._history(), Text(), self._numbers(), Text(), self._times()),
            title=Text(self.title, style="bold"),
            title_align="left",
            border_style="cyan",
            padding=(0, 1),
        )

    def _progress(self) -> RenderableType:
        line = Table.grid(padding=(0, 2, 0, 0), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        elapsed, eta = time.monotonic() - self.started_at, self.eta_s
        line.add_row(
            Text(f"rollout {self.num_done}/{self.total}", style="bold"),
            ProgressBar(total=self.total, completed=self.num_done),
            Text(f"{_clock(elapsed)} elapsed, {'?' if eta is None else _clock(eta)} left"),
        )
        return line

    def _history(self) -> RenderableType:
        span = f"  {min(self.rewards):.3f} to {max(self.rewards):.3f}" if self.rewards else ""
        return Text.assemble(("reward  ", "dim"), (sparkline(self.rewards), "green"), (span, "dim"))

    def _numbers(self) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0))
        for style in ("dim", "bold", "dim", "bold"):
            table.add_column(style=style, no_wrap=True)
        cells = [(label, self._show(name, form)) for label, name, form in _NUMBERS]
        # Some cells show a second value next to the mean.
        cells[1] = (cells[1][0], self._held_out())
        cells[2] = (cells[2][0], f"{cells[2][1]} (max {self._show('response_len/max', '.0f')})")
        cells[3] = (cells[3][0], f"{cells[3][1]} (max {self._show('logprob_diff/max', '.1e')})")
        for left, right in zip(cells[::2], cells[1::2], strict=True):
            table.add_row(*left, *right)
        return table

    def _held_out(self) -> str:
        first = "" if self.first_eval is None else f" (first {self.first_eval:.3f})"
        return self._show("eval/reward_mean", ".3f") + first

    def _times(self) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, width=8)
        table.add_column(no_wrap=True, width=_BAR_WIDTH)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, justify="right", style="dim")
        whole = sum(self.phase_seconds.values())
        for name in PHASES:
            now, share = name == self.current_phase, self.phase_seconds[name] / whole if whole else 0.0
            bar = "█" * round(share * _BAR_WIDTH)
            table.add_row(
                Text(name, style="bold yellow" if now else "dim"),
                Text(bar, style="yellow" if now else "blue"),
                f"{100 * share:.0f}%",
                f"{self._show(f'time/{name}_s', '.2f')} s",
            )
        working = f"{self.current_phase} for {time.monotonic() - self.phase_since:.0f} s"
        step = f"step {self._show('time/step_s', '.2f')} s"
        details = Text(f"{step}\n{working}", style="dim")
        both = Table.grid(padding=(0, 3, 0, 0))
        both.add_row(table, details)
        return both

    def _show(self, name: str, form: str) -> str:
        return format(self.latest[name], form) if name in self.latest else "-"


_NUMBERS = (
    ("reward", "reward/mean", ".3f"),
    ("held-out reward", "eval/reward_mean", ".3f"),
    ("response length", "response_len/mean", ".1f"),
    ("logprob diff", "logprob_diff/mean", ".1e"),
    ("loss", "train/loss", "z.4f"),
    ("grad norm", "train/grad_norm", ".3g"),
    ("learning rate", "train/lr", ".2e"),
    ("weight version", "weights/version", ".0f"),
    ("tokens/s", "throughput/tokens_per_s", ",.0f"),
    ("samples/s", "throughput/samples_per_s", ",.0f"),
)


class LiveConsole(Console):
    """Redraws a `RunView` in place. Messages scroll above it.

    While it is open, it redirects prints and logging handlers of the terminal, so that they do not garble the table.
    """

    def __init__(self, *, title: str, total: int, stream: TextIO, first_step: int = 0) -> None:
        self.view = RunView(title=title, total=total, first_step=first_step)
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._live = Live(
            console=RichConsole(file=stream, force_terminal=True),
            get_renderable=self.view.draw,
            refresh_per_second=_REDRAWS_PER_S,
            redirect_stdout=True,
            redirect_stderr=True,
        )
        # Rich replaces sys.stdout and sys.stderr at start. Remember the streams by identity to find their handlers.
        streams = {id(getattr(sys, form.format(name))): name for name in _STANDARD for form in ("{}", "__{}__")}
        self._live.start()
        self._redirect_handlers(streams)

    def phase(self, name: str) -> None:
        self.view.phase(name)

    def step(self, step: int, metrics: Metrics) -> None:
        self.view.step(step, metrics)

    def evaluated(self, step: int, metrics: Metrics) -> None:
        self.view.evaluated(metrics)

    def message(self, text: str) -> None:
        self._live.console.print(Text(text))

    def warning(self, text: str) -> None:
        self._live.console.print(Text(f"warning: {text}", style="yellow"))

    def close(self) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
        self._live.stop()

    def _redirect_handlers(self, streams: dict[int, str]) -> None:
        """Redirects logging handlers: they keep the original stream, which rich's replacement does not affect."""
        for handler in _stream_handlers():
            name = streams.get(id(handler.stream))
            if name is not None:
                self._handlers.append((handler, handler.stream))
                handler.setStream(getattr(sys, name))


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Line of block characters, scaled between the minimum and maximum of `values`. Averages longer histories."""
    if not values:
        return ""
    count = min(width, len(values))
    # `count` ranges of nearly equal length cover all values.
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        # Entries of loggerDict may be placeholders without handlers.
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
