"""Checks that misbehave, each in one way. No tests here."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure, SkipCheck

FINE = CheckResult(verdict=CheckVerdict.ok, summary="fine", figures=(Figure(name="rate", value=2.0, unit="GB/s"),))
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def fine(context: CheckContext) -> CheckResult:
    assert context.folder.is_dir() and not list(context.folder.iterdir())
    return FINE


def skip(context: CheckContext) -> CheckResult:
    raise SkipCheck("no such package")


def fail(context: CheckContext) -> CheckResult:
    raise RuntimeError("the sum must be 3, got 4")


def fail_without_advice(context: CheckContext) -> CheckResult:
    return CheckResult(verdict=CheckVerdict.failed, summary="slow")


def hang(context: CheckContext) -> CheckResult:
    os.write(1, b"waiting for a rank\n")
    time.sleep(600)
    return FINE


def ignore_signals_and_hang(context: CheckContext) -> CheckResult:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


def segfault(context: CheckContext) -> CheckResult:
    ctypes.string_at(0)
    return FINE


def exit_at_once(context: CheckContext) -> CheckResult:
    os.write(1, b"bye\n")
    os._exit(3)


def exit_by_exception(context: CheckContext) -> CheckResult:
    sys.exit(4)


def print_without_end(context: CheckContext) -> CheckResult:
    line = b"x" * 999 + b"\n"
    for _ in range(10_000):
        os.write(1, line)
    raise RuntimeError("after 10 MB")


def print_binary(context: CheckContext) -> CheckResult:
    os.write(1, b"\xff\x00\x1b[31mred\r\n" + b"y" * 5000 + b"\n")
    raise RuntimeError("no text")


def leave_zombie(context: CheckContext) -> CheckResult:
    """A child that ends and is never waited for, and one that lives on in the same group."""
    if os.fork() == 0:
        os._exit(0)
    subprocess.Popen(SLEEPER)
    return FINE


def leave_daemon(context: CheckContext) -> CheckResult:
    """A process in its own session, which keeps the output open."""
    subprocess.Popen(SLEEPER, start_new_session=True)
    return FINE


def hang_with_daemon(context: CheckContext) -> CheckResult:
    subprocess.Popen(SLEEPER, start_new_session=True)
    time.sleep(600)
    return FINE


def hang_at_exit(context: CheckContext) -> CheckResult:
    import atexit

    atexit.register(time.sleep, 600)
    return FINE


def crash_at_exit(context: CheckContext) -> CheckResult:
    import atexit

    atexit.register(os.abort)
    return FINE


def _result_file() -> Path:
    return next(Path(word.removeprefix("--result=")) for word in sys.argv if word.startswith("--result="))


def write_garbage(context: CheckContext) -> CheckResult:
    _result_file().write_text("{not json")
    os._exit(0)


def write_other_json(context: CheckContext) -> CheckResult:
    _result_file().write_text(json.dumps({"verdict": "great", "summary": "", "next_step": "", "figures": []}))
    os._exit(0)


def write_huge_result(context: CheckContext) -> CheckResult:
    _result_file().write_text("[" * (2 << 20))
    os._exit(0)


def nan(context: CheckContext) -> CheckResult:
    return CheckResult(verdict=CheckVerdict.ok, summary="", figures=(Figure(name="a", value=float("nan")),))
