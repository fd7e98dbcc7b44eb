"""Every check ends with a verdict, whatever it does, and leaves no process."""

import os
import sys
import time
from pathlib import Path

import pytest

from rlscale.cluster.process_reaper import marked_processes
from rlscale.doctor import run_checks as module
from rlscale.doctor.catalog import Check
from rlscale.doctor.check_result import CheckVerdict
from rlscale.doctor.run_checks import CheckOutcome, run_checks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

ROOT = Path(__file__).parents[3]
LONG_S, SHORT_S = 60.0, 3.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of these tests can be imported in their processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """One mark for all processes of a test, so that it can search for them."""
    value = f"test-{os.getpid()}-{time.monotonic_ns()}"

    class Uuid:
        hex = value

    monkeypatch.setattr(module.uuid, "uuid4", Uuid)
    return value


def check(function: str, *, deadline_s: float = LONG_S, needs_cuda: bool = False) -> Check:
    return Check(
        name=function.replace("_", "-"),
        title="",
        target=f"tests.ranks.doctor.misbehaving:{function}",
        deadline_s=deadline_s,
        advice="read the log",
        needs_cuda=needs_cuda,
    )


def run(function: str, *, deadline_s: float = LONG_S) -> CheckOutcome:
    [outcome] = run_checks([check(function, deadline_s=deadline_s)], device="cpu")
    return outcome


def test_a_fine_check_has_its_figures_and_no_output() -> None:
    outcome = run("fine")
    assert outcome.result.verdict == CheckVerdict.ok and outcome.result.summary == "fine"
    assert [str(figure) for figure in outcome.result.figures] == ["rate 2 GB/s"]
    assert outcome.output == ()


def test_a_check_can_skip_itself_with_a_reason() -> None:
    result = run("skip").result
    assert (result.verdict, result.summary, result.next_step) == (CheckVerdict.skipped, "no such package", "")


def test_a_check_that_needs_cuda_starts_no_process_on_a_cpu() -> None:
    gpu = check("segfault", needs_cuda=True)
    [outcome] = run_checks([gpu], device="cpu")
    assert (outcome.result.verdict, outcome.result.summary) == (CheckVerdict.skipped, "needs a CUDA device")


@pytest.mark.parametrize(
    ("function", "summary", "last_line"),
    [
        ("fail", "RuntimeError: the sum must be 3, got 4", "RuntimeError: the sum must be 3, got 4"),
        ("fail_without_advice", "slow", None),
        ("segfault", "ended with signal SIGSEGV and without a result", "Segmentation fault"),
        ("exit_at_once", "ended with exit code 3 and without a result", "bye"),
        ("exit_by_exception", "ended with exit code 4 and without a result", None),
        ("print_without_end", "RuntimeError: after 10 MB", "RuntimeError: after 10 MB"),
        ("print_binary", "RuntimeError: no text", "RuntimeError: no text"),
        ("write_garbage", "wrote a result that cannot be read", None),
        ("write_other_json", "wrote a result that cannot be read: 'great' is not a valid CheckVerdict", None),
        ("write_huge_result", "wrote a result of more than 1048576 bytes", None),
        ("missing", "AttributeError", "AttributeError"),
    ],
)
def test_a_check_that_breaks_is_a_failure_with_its_last_lines(
    function: str, summary: str, last_line: str | None
) -> None:
    outcome = run(function)
    assert outcome.result.verdict == CheckVerdict.failed
    assert summary in outcome.result.summary
    assert outcome.result.next_step == "read the log"
    assert len(outcome.output) <= 20 and all(len(line) <= 300 for line in outcome.output)
    assert last_line is None or any(last_line in line for line in outcome.output)
    assert all(line.isprintable() for line in outcome.output)


@pytest.mark.parametrize("function", ["hang", "ignore_signals_and_hang", "hang_with_daemon"])
def test_a_check_that_hangs_is_killed_with_all_its_processes(function: str, mark: str) -> None:
    outcome = run(function, deadline_s=SHORT_S)
    assert outcome.result.verdict == CheckVerdict.timed_out
    assert outcome.result.summary == "did not finish within 3 s; the last lines show where it was"
    # The traceback that the process writes before its deadline names the function.
    assert any(f"in {function}" in line for line in outcome.output)
    assert marked_processes(mark, variable=module.MARK) == []


@pytest.mark.parametrize("function", ["leave_zombie", "leave_daemon"])
def test_processes_that_a_check_leaves_are_killed(function: str, mark: str) -> None:
    assert run(function).result.verdict == CheckVerdict.ok
    assert marked_processes(mark, variable=module.MARK) == []


@pytest.mark.parametrize(
    ("function", "summary"),
    [
        ("hang_at_exit", "fine; then its process did not end and was killed"),
        ("crash_at_exit", "fine; then its process ended with signal SIGABRT"),
    ],
)
def test_a_process_that_does_not_end_well_is_a_warning(function: str, summary: str) -> None:
    outcome = run(function, deadline_s=SHORT_S)
    assert (outcome.result.verdict, outcome.result.summary) == (CheckVerdict.warning, summary)
    assert [str(figure) for figure in outcome.result.figures] == ["rate 2 GB/s"]


def test_a_value_that_json_lacks_becomes_text() -> None:
    [figure] = run("nan").result.figures
    assert figure.value == "nan"


def test_no_check_stops_the_next_and_no_file_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(module.tempfile, "tempdir", None)
    checks = [check("hang", deadline_s=1.5), check("segfault"), check("exit_at_once"), check("fine")]
    verdicts = [outcome.result.verdict for outcome in run_checks(checks, device="cpu")]
    assert verdicts == [CheckVerdict.timed_out, CheckVerdict.failed, CheckVerdict.failed, CheckVerdict.ok]
    assert list(tmp_path.iterdir()) == []


def test_the_scale_changes_deadlines() -> None:
    [outcome] = run_checks([check("hang", deadline_s=100.0)], device="cpu", deadline_scale=0.02)
    assert outcome.result.verdict == CheckVerdict.timed_out
    assert outcome.check.deadline_s == 2.0


def test_an_interrupt_kills_the_check(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    def interrupted(self: object, timeout: float | None = None) -> int:
        if timeout == LONG_S:
            while len(marked_processes(mark, variable=module.MARK)) < 2:  # the check and its daemon
                time.sleep(0.02)
            raise KeyboardInterrupt
        return wait(self, timeout)  # type: ignore[arg-type]

    wait = module.subprocess.Popen.wait
    monkeypatch.setattr(module.subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("hang_with_daemon")
    assert marked_processes(mark, variable=module.MARK) == []
