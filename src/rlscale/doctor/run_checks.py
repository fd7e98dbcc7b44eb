"""Runs checks one after the other, each in a separate process with a deadline.

    run_checks ── python -m rlscale.doctor.child <check> ──> result.json
        │              └─ engines, Ray, ranks: they inherit the mark RLSCALE_DOCTOR
        └─ at the deadline, and after every check: kills its process group and every process with the mark

Whatever a check does (hang, crash, exit, print without end, leave processes), the next one starts. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlscale.cluster.process_reaper import marked_trees
from rlscale.doctor.catalog import Check
from rlscale.doctor.check_result import CheckResult, CheckVerdict, parse_result

MARK = "RLSCALE_DOCTOR"
"""Environment variable that every process of a check inherits."""

OUTPUT_BYTES = 1 << 16  # of the end of the output that is kept
OUTPUT_LINES = 20
MAX_LINE = 300
MAX_RESULT_BYTES = 1 << 20
KILL_WAIT_S = 5.0
_FIRST, _LAST = "(most recent call first):", "(most recent call last):"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""On a CPU libraries that ask for any GPU, such as Megatron-core, must find none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOutcome:
    """A check and its result."""

    check: Check
    result: CheckResult
    seconds: float
    output: tuple[str, ...] = ()  # last lines of a check that is not ok


def run_checks(checks: Sequence[Check], *, device: str, deadline_scale: float = 1.0) -> Iterator[CheckOutcome]:
    """Yields the outcome of each check as it finishes.

    Args:
        checks: in order.
        device: "cpu" or "cuda"; checks that need CUDA are skipped on a CPU.
        deadline_scale: factor for all deadlines, for a slow machine.
    """
    models = Path(tempfile.mkdtemp(prefix="rlscale-doctor-models-", dir=_scratch_root()))
    try:
        for check in checks:
            if check.needs_cuda and device != "cuda":
                reason = CheckResult(verdict=CheckVerdict.skipped, summary="needs a CUDA device")
                yield CheckOutcome(check=check, result=reason, seconds=0.0)
                continue
            scaled = replace(check, deadline_s=check.deadline_s * deadline_scale)
            yield _run_check(scaled, device=device, models=models)
    finally:
        shutil.rmtree(models, ignore_errors=True)


def _run_check(check: Check, *, device: str, models: Path) -> CheckOutcome:
    folder = Path(
        tempfile.mkdtemp(prefix=f"rlscale-doctor-{check.name}-", dir=None if check.on_disk else _scratch_root())
    )
    try:
        return _run_process(check, device=device, folder=folder, models=models)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_process(check: Check, *, device: str, folder: Path, models: Path) -> CheckOutcome:
    mark, result = uuid.uuid4().hex, folder / "result.json"
    scratch = folder / "files"
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "rlscale.doctor.child", check.target, f"--device={device}"]
    command += [f"--folder={scratch}", f"--models={models}", f"--result={result}", f"--deadline={check.deadline_s}"]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **OFFLINE, **({} if device == "cuda" else HIDE_GPUS), MARK: mark},
        start_new_session=True,
    )
    output = _OutputTail(process)
    in_time = True
    try:
        process.wait(check.deadline_s)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        # Also after a normal end, and when the user interrupts the doctor.
        _kill_all(process, mark)
    seconds = time.monotonic() - began
    found = _judge(check, process.returncode, result, in_time=in_time)
    is_fine = found.verdict in (CheckVerdict.ok, CheckVerdict.skipped)
    return CheckOutcome(check=check, result=found, seconds=seconds, output=() if is_fine else output.lines())


def _judge(check: Check, status: int | None, path: Path, *, in_time: bool) -> CheckResult:
    """CheckVerdict of a process that has ended, from its result file and its exit status."""
    result, fault = _read_result(path)
    if result is not None:
        if result.verdict not in (CheckVerdict.ok, CheckVerdict.skipped) and not result.next_step:
            result = replace(result, next_step=check.advice)
        if result.verdict != CheckVerdict.ok or (in_time and status == 0):
            return result
        # The check itself is fine, but not the end of its process.
        end = f"ended with {_describe_status(status)}" if in_time else "did not end and was killed"
        summary = f"{result.summary}; then its process {end}"
        return replace(result, verdict=CheckVerdict.warning, summary=summary, next_step=check.advice)
    if not in_time:
        summary = f"did not finish within {check.deadline_s:.0f} s; the last lines show where it was"
        advice = f"on a slow or busy machine give a larger --deadline-scale; else {check.advice}"
        return CheckResult(verdict=CheckVerdict.timed_out, summary=summary, next_step=advice)
    summary = fault or f"ended with {_describe_status(status)} and without a result"
    return CheckResult(verdict=CheckVerdict.failed, summary=summary, next_step=check.advice)


def _read_result(path: Path) -> tuple[CheckResult | None, str]:
    """The result in a file, or the reason why it cannot be used; both empty where there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RESULT_BYTES + 1)
    except OSError:
        return None, ""
    if len(content) > MAX_RESULT_BYTES:
        return None, f"wrote a result of more than {MAX_RESULT_BYTES} bytes"
    try:
        return parse_result(json.loads(content)), ""
    except (ValueError, RecursionError) as error:
        return None, f"wrote a result that cannot be read: {' '.join(str(error).split())[:MAX_LINE]}"


def _describe_status(status: int | None) -> str:
    if status is None:
        return "an unknown status"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


class _OutputTail:
    """Reads the output of a process all the time, so that it never blocks, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._stream, self._kept = process.stdout, bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._stream:
            while chunk := os.read(self._stream.fileno(), OUTPUT_BYTES):
                self._kept = (self._kept + chunk)[-OUTPUT_BYTES:]

    def lines(self) -> tuple[str, ...]:
        # A process that could not be killed may keep the pipe open: the thread is then left behind.
        self._thread.join(KILL_WAIT_S)
        text = bytes(self._kept).decode(errors="replace")
        lines = ["".join(c if c.isprintable() or c == " " else " " for c in line) for line in text.splitlines()]
        kept = [line.rstrip()[:MAX_LINE] for line in lines if line.strip()]
        return tuple(order_stacks(kept)[-OUTPUT_LINES:])


def order_stacks(lines: Sequence[str]) -> list[str]:
    """The lines with the stacks of faulthandler in the order of a traceback: the last line shows where a thread was."""
    ordered, stack, is_stack = list[str](), list[str](), False
    for line in lines:
        if is_stack and line.startswith("  "):
            stack.append(line)
            continue
        ordered += reversed(stack)
        stack, is_stack = [], line.endswith(_FIRST)
        ordered.append(line.removesuffix(_FIRST) + _LAST if is_stack else line)
    return [*ordered, *reversed(stack)]


def _kill_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the process group of a check and every process with its mark, e.g. daemons in their own session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + KILL_WAIT_S
    # Repeated: a process may start another one between the search and its death.
    while sys.platform == "linux" and time.monotonic() < until:
        found = {pid for pid, _ in marked_trees(mark, variable=MARK)}
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    # A process in an uninterruptible call of the driver does not die: the next check starts all the same.
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _scratch_root() -> Path | None:
    """Folder for the files of checks: shared memory where it has space for a model of 4B in bfloat16."""
    shared = Path("/dev/shm")
    if "TMPDIR" in os.environ or not os.access(shared, os.W_OK):
        return None
    return shared if shutil.disk_usage(shared).free > 24e9 else None
