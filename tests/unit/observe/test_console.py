"""Choice of the console, and output of the plain and the silent one."""

import io
import logging
import os
import pty

import pytest

from rlscale.config import ConsoleMode
from rlscale.observe.console import FIRST_STEPS, LINE_INTERVAL_S, PlainConsole, SilentConsole, open_console, step_line
from rlscale.observe.live_table import LiveConsole
from tests.unit.observe.terminal import AsciiTerminal, FakeTerminal

STEP = {
    "reward/mean": 0.4123,
    "train/loss": -0.01234,
    "train/grad_norm": 0.8349,
    "train/lr": 3e-4,
    "response_len/mean": 3.14,
    "logprob_diff/mean": 2.1e-7,
    "weights/version": 12.0,
    "time/step_s": 0.214,
    "throughput/tokens_per_s": 3912.4,
}


@pytest.mark.parametrize(
    ("mode", "stream", "term", "kind"),
    [
        ("auto", FakeTerminal(), "xterm-256color", LiveConsole),
        ("auto", FakeTerminal(), "dumb", PlainConsole),
        ("auto", AsciiTerminal(), "xterm-256color", PlainConsole),
        ("auto", io.StringIO(), "xterm-256color", PlainConsole),
        ("live", io.StringIO(), "xterm-256color", LiveConsole),
        ("plain", FakeTerminal(), "xterm-256color", PlainConsole),
        (ConsoleMode.none, FakeTerminal(), "xterm-256color", SilentConsole),
    ],
)
def test_the_mode_chooses_the_console(
    mode: str, stream: io.StringIO, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    with open_console(mode, title="t", total=3, stream=stream) as console:
        assert type(console) is kind


def test_a_reader_that_ends_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, open_console("plain", title="t", total=3, stream=stream) as console:
        for step in range(3):
            console.step(step, STEP)
    assert caplog.messages == [
        "the output of the run is lost ([Errno 32] Broken pipe); it continues and writes its metrics to its folder"
    ]


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_terminal_that_closes_does_not_end_the_run(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        with open_console(mode, title="t", total=3, stream=stream) as console:
            console.step(0, STEP)
            os.close(master)
            console.step(1, STEP)
            console.message("goes nowhere")
        stream.write("goes nowhere, too")
    (message,) = caplog.messages
    assert message.startswith("the output of the run is lost ([Errno 5] Input/output error); it continues")


def test_a_stream_that_is_no_file_may_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    class LostStream(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("the connection has closed")

    with open_console("plain", title="t", total=3, stream=LostStream()) as console:
        console.step(0, STEP)
        console.step(1, STEP)
    (message,) = caplog.messages
    assert message.startswith("the output of the run is lost (the connection has closed); it continues")


def test_a_step_is_one_line() -> None:
    assert step_line(STEP) == (
        "reward 0.412  loss -0.0123  grad 0.835  lr 0.0003  len 3.1  diff 2.1e-07  v 12  step 0.21s  3,912 tok/s"
    )


def test_a_step_without_engines_has_a_shorter_line() -> None:
    assert step_line({"train/loss": 1.5}) == "loss 1.5000  - tok/s"


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_lines(total: int, seconds_per_step: float, *, eval_every: int | None = None) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(title="run", total=total, stream=stream, clock=clock)
    for step in range(total):
        clock.now += seconds_per_step
        evaluated = eval_every is not None and (step + 1) % eval_every == 0
        console.step(step, STEP | ({"eval/reward_mean": 0.5} if evaluated else {}))
    return stream.getvalue().splitlines()


def test_plain_output_thins_out_after_the_first_steps() -> None:
    shown = [int(line.split()[1].split("/")[0]) for line in plain_lines(total=1000, seconds_per_step=0.1)]
    assert shown[:FIRST_STEPS] == list(range(1, FIRST_STEPS + 1))
    assert shown[-1] == 1000
    gaps = {b - a for a, b in zip(shown[FIRST_STEPS - 1 : -2], shown[FIRST_STEPS:-1], strict=True)}
    assert min(gaps) >= 0.9 * LINE_INTERVAL_S / 0.1
    assert max(gaps) <= 1.1 * LINE_INTERVAL_S / 0.1


def test_slow_steps_print_one_line_each() -> None:
    assert len(plain_lines(total=60, seconds_per_step=LINE_INTERVAL_S)) == 60


def test_every_evaluation_has_a_line() -> None:
    lines = plain_lines(total=500, seconds_per_step=0.001, eval_every=100)
    assert sum("held-out 0.500" in line for line in lines) == 5


def test_plain_output_reports_events_in_order() -> None:
    stream = io.StringIO()
    with open_console("plain", title="run", total=2, stream=stream) as console:
        console.phase("start")
        console.evaluated(0, {"eval/reward_mean": 0.25})
        console.phase("rollout")
        console.message("resuming")
        console.warning("something is off")
    assert stream.getvalue().splitlines() == [
        "[run] starting",
        "[run] 0/2  held-out 0.250",
        "[run] resuming",
        "[run] warning: something is off",
    ]


@pytest.mark.parametrize(
    ("versions", "line"),
    [((1, 6), "0.250 (by weights 1 to 6)"), ((6, 6), "0.250 (by weights 6)"), ((0, 0), "0.250")],
)
def test_an_evaluation_by_other_weights_says_so(versions: tuple[int, int], line: str) -> None:
    stream = io.StringIO()
    low, high = versions
    metrics = {
        "eval/reward_mean": 0.25,
        "eval/weight_version": 0.0,
        "eval/a/version_min": low,
        "eval/a/version_max": high,
    }
    with open_console("plain", title="run", total=2, stream=stream) as console:
        console.evaluated(0, metrics)
    assert stream.getvalue() == f"[run] 0/2  held-out {line}\n"


def test_the_silent_console_logs_warnings(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_console("none", title="t", total=1) as console:
        console.phase("start")
        console.step(0, STEP)
        console.evaluated(0, STEP)
        console.message("hello")
        console.warning("careful")
    assert capsys.readouterr().out == ""
    assert [record.message for record in caplog.records] == ["careful"]
