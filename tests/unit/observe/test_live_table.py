"""Live table, rendered to a string and to a fake terminal."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest
from rich.console import Console as RichConsole

from rlscale.observe.live_table import LiveConsole, RunView, sparkline
from tests.unit.observe.terminal import FakeTerminal

STEP = {
    "reward/mean": 0.4,
    "response_len/mean": 3.1,
    "response_len/max": 5.0,
    "logprob_diff/mean": 2.1e-7,
    "logprob_diff/max": 3.1e-6,
    "train/loss": 0.0123,
    "train/grad_norm": 0.834,
    "train/lr": 3e-4,
    "weights/version": 10.0,
    "throughput/tokens_per_s": 3912.3,
    "time/step_s": 0.2,
    "time/rollout_s": 0.1,
    "time/train_s": 0.06,
    "time/sync_s": 0.04,
}


def draw(view: RunView, *, width: int = 80) -> str:
    console = RichConsole(file=io.StringIO(), record=True, width=width)
    console.print(view.draw())
    return console.export_text()


def trained_view(num_steps: int = 10, total: int = 40) -> RunView:
    view = RunView(title="quickstart-1a2b3c4d", total=total)
    view.evaluated({"eval/reward_mean": 0.231})
    for step in range(num_steps):
        view.step(step, STEP | {"reward/mean": 0.3 + step / 20})
    view.phase("train")
    return view


def test_a_run_before_its_first_step_can_be_drawn() -> None:
    text = draw(RunView(title="fresh", total=5))
    assert "fresh" in text
    assert "rollout 0/5" in text
    assert "? left" in text
    assert "start for 0 s" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_shows_every_number_in_full(width: int) -> None:
    text = draw(trained_view(), width=width)
    for part in (
        "quickstart-1a2b3c4d",
        "rollout 10/40",
        "0:06 left",
        "0.300 to 0.750",
        "0.750",
        "held-out reward  0.231 (first 0.231)",
        "response length  3.1 (max 5)",
        "2.1e-07 (max 3.1e-06)",
        "weight version   10",
        "0.0123",
        "0.834",
        "3.00e-04",
        "3,912",
        "step 0.20 s",
        "train for 0 s",
    ):
        assert part in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_step_time_is_split_by_phase() -> None:
    lines = {line.split()[1]: line for line in draw(trained_view()).splitlines() if "%" in line}
    shares = {name: int(line.split("%")[0].split()[-1]) for name, line in lines.items()}
    assert shares == {"rollout": 50, "train": 30, "sync": 20, "eval": 0, "save": 0}
    assert {name: line.count("█") for name, line in lines.items()} == {
        "rollout": 10,
        "train": 6,
        "sync": 4,
        "eval": 0,
        "save": 0,
    }


def test_the_first_evaluation_is_shown_next_to_the_newest() -> None:
    view = trained_view()
    view.step(10, STEP | {"eval/reward_mean": 0.64})
    assert "0.640 (first 0.231)" in draw(view)


def test_a_run_without_rewards_is_drawn() -> None:
    view = RunView(title="warm-up", total=3)
    view.step(0, {"train/loss": 1.25, "time/step_s": 0.1, "time/train_s": 0.1})
    assert "1.2500" in draw(view)


def test_a_resumed_run_starts_at_its_first_step() -> None:
    view = RunView(title="t", total=40, first_step=30)
    assert "rollout 30/40" in draw(view)
    view.step(30, STEP)
    assert view.eta_s == pytest.approx(9 * 0.2)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 4, ""),
        ([1.0], 4, "▁"),
        ([0.5, 0.5], 4, "▁▁"),
        ([0.0, 1.0], 4, "▁█"),
        ([0.0, 0.0, 4.0, 4.0, 7.0, 7.0], 3, "▁▅█"),
        (list(range(8)), 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


@contextmanager
def logger_on_stderr(stderr: io.StringIO) -> Iterator[logging.Logger]:
    """Logger whose handler got sys.stderr before the table opened."""
    logger, handler = logging.getLogger("test_live_table"), logging.StreamHandler(stderr)
    logger.addHandler(handler)
    # No fixture: pytest replaces sys.stderr between fixtures and the test.
    with redirect_stderr(stderr):
        yield logger
    logger.removeHandler(handler)


def test_logs_prints_and_messages_go_above_the_table() -> None:
    stderr = io.StringIO()
    with logger_on_stderr(stderr) as logger:
        shown = show_while_logging(logger)
        logger.warning("after the run")
    for text in ("from a logging handler", "from sys.stderr", "a message [with brackets]", "warning: a warning"):
        assert shown.count(text) == 1
    assert stderr.getvalue() == "after the run\n"
    last_table = shown[shown.rindex("╭") :]
    assert "rollout 1/3" in last_table
    assert "from a logging" not in last_table


def show_while_logging(logger: logging.Logger) -> str:
    """Output on the terminal of a run with logs, prints and messages."""
    terminal = FakeTerminal()
    with LiveConsole(title="run", total=3, stream=terminal) as console:
        console.phase("rollout")
        console.step(0, STEP)
        logger.warning("from a logging handler")
        sys.stderr.write("from sys.stderr\n")
        console.message("a message [with brackets]")
        console.warning("a warning")
    return terminal.getvalue()


def test_the_terminal_is_restored_when_the_run_fails() -> None:
    streams, terminal = (sys.stdout, sys.stderr), FakeTerminal()
    with pytest.raises(RuntimeError, match="boom"), LiveConsole(title="run", total=3, stream=terminal):
        raise RuntimeError("boom")
    assert (sys.stdout, sys.stderr) == streams
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is visible again
