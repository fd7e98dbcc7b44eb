"""How a run shows itself while it goes: a live table, plain lines, or nothing.

A run's driver opens one console and tells it what happens; `rlscale.observe.live_table` draws the table.
"""

import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rlscale.config import ConsoleMode
from rlscale.protocols import Metrics

_log = logging.getLogger("rlscale")

FIRST_STEPS = 20
"""Plain output has a line for each of the first steps, because there mistakes show."""

LINE_INTERVAL_S = 5.0
"""After them, a line at most this often; evaluations and the last step always have one."""


class Console(ABC):
    """What the driver of a run tells its user. A context manager: leaving it restores the terminal.

    Called from one thread. Steps may be reported from any start (a resumed run), in rising order.
    """

    @abstractmethod
    def phase(self, name: str) -> None:
        """What the run is doing now: `start`, `rollout`, `train`, `sync`, `eval`, `save`."""

    @abstractmethod
    def step(self, step: int, metrics: Metrics) -> None:
        """The metrics of a finished rollout, counted from 0."""

    @abstractmethod
    def evaluated(self, step: int, metrics: Metrics) -> None:
        """The metrics of an evaluation outside a step, after `step` rollouts."""

    @abstractmethod
    def message(self, text: str) -> None:
        """A line that stays on the screen."""

    @abstractmethod
    def warning(self, text: str) -> None:
        """A line that stays on the screen and stands out."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the terminal as it was found; what was shown stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_console(
    mode: ConsoleMode | str, *, title: str, total: int, stream: TextIO | None = None, first_step: int = 0
) -> Console:
    """The console for `logging.console`.

    Args:
        mode: `auto` is `live` on a Unicode terminal that can move its cursor, else `plain`.
        title: name of the run.
        total: rollouts of the whole run.
        stream: where to write; None is standard output.
        first_step: rollouts that an earlier start of this run has done.
    """
    stream = sys.stdout if stream is None else stream
    chosen = ConsoleMode(mode)
    if chosen == ConsoleMode.auto:
        chosen = ConsoleMode.live if _can_redraw(stream) else ConsoleMode.plain
    if chosen == ConsoleMode.live:
        from rlscale.observe.live_table import LiveConsole  # which imports Console from here

        return LiveConsole(title=title, total=total, stream=stream, first_step=first_step)
    if chosen == ConsoleMode.plain:
        return PlainConsole(title=title, total=total, stream=stream)
    return SilentConsole()


class PlainConsole(Console):
    """A line per event, for logs and pipes; thinned out after the first steps."""

    def __init__(self, *, title: str, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._total, self._stream, self._clock = title, total, stream, clock
        self._last_line_at = clock()

    def phase(self, name: str) -> None:
        if name == "start":
            self._write(f"[{self._title}] starting")

    def step(self, step: int, metrics: Metrics) -> None:
        wanted = step < FIRST_STEPS or step + 1 >= self._total or any(name.startswith("eval/") for name in metrics)
        if wanted or self._clock() - self._last_line_at >= LINE_INTERVAL_S:
            self._write(f"[{self._title}] {step + 1}/{self._total}  {step_line(metrics)}")

    def evaluated(self, step: int, metrics: Metrics) -> None:
        self._write(f"[{self._title}] {step}/{self._total}  held-out {_number(metrics, 'eval/reward_mean', '.3f')}")

    def message(self, text: str) -> None:
        self._write(f"[{self._title}] {text}")

    def warning(self, text: str) -> None:
        self._write(f"[{self._title}] warning: {text}")

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()  # a pipe would hold lines back for minutes
        self._last_line_at = self._clock()


class SilentConsole(Console):
    """Shows nothing; warnings go to Python's logging, since nothing may be swallowed."""

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Metrics) -> None:
        pass

    def evaluated(self, step: int, metrics: Metrics) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        _log.warning(text)

    def close(self) -> None:
        pass


_LINE = (
    ("reward", "reward/mean", ".3f"),
    ("held-out", "eval/reward_mean", ".3f"),
    ("loss", "train/loss", "z.4f"),
    ("grad", "train/grad_norm", ".3g"),
    ("lr", "train/lr", ".2g"),
    ("len", "response_len/mean", ".1f"),
    ("diff", "logprob_diff/mean", ".1e"),
    ("v", "weights/version", ".0f"),
    ("step", "time/step_s", ".2f"),
)


def step_line(metrics: Metrics) -> str:
    """The few numbers of a step that fit on a line; those the step does not have are left out."""
    parts = [f"{label} {_number(metrics, name, form)}" for label, name, form in _LINE if name in metrics]
    line = "  ".join(parts) + ("s" if "time/step_s" in metrics else "")
    return f"{line}  {_number(metrics, 'throughput/tokens_per_s', ',.0f')} tok/s"


def _number(metrics: Metrics, name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def _can_redraw(stream: TextIO) -> bool:
    is_unicode = (stream.encoding or "").lower().startswith("utf")  # the table's bars and lines need it
    return is_unicode and stream.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
