"""Progress of a run on the terminal: a live table, plain lines, or nothing.

The driver opens one console and reports events to it; `rlscale.observe.live_table` draws the table.
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
from rlscale.observe.unfailing_stream import unfailing
from rlscale.protocols import Metrics

_log = logging.getLogger("rlscale")

FIRST_STEPS = 20
"""Plain output prints a line for each of the first steps, because wrong settings show there."""

LINE_INTERVAL_S = 5.0
"""After them, minimum interval between two lines. Evaluations and the last step always print one."""


class Console(ABC):
    """Interface of a console. A context manager: leaving it restores the terminal.

    All calls come from one thread. Steps arrive in rising order; a resumed run starts at any step.
    """

    @abstractmethod
    def phase(self, name: str) -> None:
        """Shows the current phase: `start`, `rollout`, `train`, `sync`, `eval`, `save`."""

    @abstractmethod
    def step(self, step: int, metrics: Metrics) -> None:
        """Shows the metrics of a finished rollout. Rollouts count from 0."""

    @abstractmethod
    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Shows the metrics of an evaluation outside a step, after `step` rollouts."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Prints a line that stays on the screen."""

    @abstractmethod
    def warning(self, text: str) -> None:
        """Prints a highlighted line that stays on the screen."""

    @abstractmethod
    def close(self) -> None:
        """Restores the terminal. All output so far stays visible."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_console(
    mode: ConsoleMode | str, *, title: str, total: int, stream: TextIO | None = None, first_step: int = 0
) -> Console:
    """Opens the console for `logging.console`.

    Args:
        mode: `auto` selects `live` on a Unicode terminal that can move its cursor, else `plain`.
        title: name of the run.
        total: number of rollouts of the whole run.
        stream: output stream. None: standard output.
        first_step: number of rollouts that earlier starts of this run have completed.
    """
    stream = unfailing(sys.stdout if stream is None else stream)
    chosen = ConsoleMode(mode)
    if chosen == ConsoleMode.auto:
        chosen = ConsoleMode.live if _can_redraw(stream) else ConsoleMode.plain
    if chosen == ConsoleMode.live:
        # Imported here because live_table imports Console from this module.
        from rlscale.observe.live_table import LiveConsole

        return LiveConsole(title=title, total=total, stream=stream, first_step=first_step)
    if chosen == ConsoleMode.plain:
        return PlainConsole(title=title, total=total, stream=stream)
    return SilentConsole()


class PlainConsole(Console):
    """Prints a line per event, for logs and pipes. Prints fewer lines after the first steps."""

    def __init__(self, *, title: str, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._total, self._stream, self._clock = title, total, stream, clock
        self._last_line_at = clock()

    def phase(self, name: str) -> None:
        if name == "start":
            self._write(f"[{self._title}] starting")

    def step(self, step: int, metrics: Metrics) -> None:
        is_due = step < FIRST_STEPS or step + 1 >= self._total or any(name.startswith("eval/") for name in metrics)
        if is_due or self._clock() - self._last_line_at >= LINE_INTERVAL_S:
            self._write(f"[{self._title}] {step + 1}/{self._total}  {step_line(metrics)}")

    def evaluated(self, step: int, metrics: Metrics) -> None:
        held_out = f"held-out {_number(metrics, 'eval/reward_mean', '.3f')}{_measured_weights(metrics)}"
        self._write(f"[{self._title}] {step}/{self._total}  {held_out}")

    def message(self, text: str) -> None:
        self._write(f"[{self._title}] {text}")

    def warning(self, text: str) -> None:
        self._write(f"[{self._title}] warning: {text}")

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        # A pipe is block-buffered and would delay lines for minutes.
        self._stream.flush()
        self._last_line_at = self._clock()


class SilentConsole(Console):
    """Prints nothing. Warnings go to Python's logging, so that none is lost."""

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


_VERSIONS = ("/version_min", "/version_max")


def step_line(metrics: Metrics) -> str:
    """Main metrics of a step on one line. Skips metrics that the step does not have."""
    parts = [f"{label} {_number(metrics, name, form)}" for label, name, form in _LINE if name in metrics]
    line = "  ".join(parts) + ("s" if "time/step_s" in metrics else "")
    return f"{line}  {_number(metrics, 'throughput/tokens_per_s', ',.0f')} tok/s"


def _measured_weights(metrics: Metrics) -> str:
    """Weight versions of an evaluation that ran during weight updates; empty if they are those of its step."""
    found = [value for name, value in metrics.items() if name.startswith("eval/") and name.endswith(_VERSIONS)]
    if not found or min(found) == max(found) == metrics.get("eval/weight_version"):
        return ""
    low, high = min(found), max(found)
    return f" (by weights {low:.0f})" if low == high else f" (by weights {low:.0f} to {high:.0f})"


def _number(metrics: Metrics, name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def _can_redraw(stream: TextIO) -> bool:
    # The bars and frames of the live table are Unicode characters.
    is_unicode = (stream.encoding or "").lower().startswith("utf")
    return is_unicode and stream.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
