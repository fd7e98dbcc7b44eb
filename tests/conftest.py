"""Settings of every test: no network, one thread per process, markers by folder, and which worker gets what when."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Before anything imports transformers or torch; child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that crashes leaves a traceback in its log.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

SLOW_S = 1800  # after which a slow test has hung
TESTS = Path(__file__).parent
ARGUMENTS = TESTS / "unit" / "config" / "test_arguments_csv.py"

# Their tests look at one run, which is a fixture of the module.
OF_ONE_RUN = ("tests/integration/test_parts.py", "tests/integration/test_trackers.py")
RUNS = "tests/integration/test_"

# What is started first, the longest before the others: a worker that begins a long test at the end leaves the others
# waiting. Only the order matters; all else comes afterwards, files of many tests first.
LONGEST_FIRST = (
    "tests/packaging/test_quickstart.py",
    "contract",
    f"{RUNS}crash.py",
    f"{RUNS}sglang.py::test_the_quickstart",
    f"{RUNS}megatron.py::test_the_quickstart",
    f"{RUNS}run.py::test_a_mixture_of_experts_learns",
    f"{RUNS}trackers.py",
    f"{RUNS}parts.py",
    f"{RUNS}presets.py",
    f"{RUNS}sglang.py",
    "tests/ranks/training/test_megatron_backend.py",
    f"{RUNS}algorithms.py",
    "tests/packaging/test_wheel.py",
    f"{RUNS}tutorial.py",
    f"{RUNS}roles.py",
    f"{RUNS}run.py::test_a_sweep",
    f"{RUNS}run.py::test_a_mixture_of_experts",
    f"{RUNS}external.py",
    f"{RUNS}faults.py::test_a_trainer",
    f"{RUNS}staleness.py",
    f"{RUNS}megatron.py",
)


IN_PROCESS = tuple(TESTS / name for name in ("unit", "golden", "property"))
"""Folders whose tests start no process. A test that does belongs to tests/ranks."""

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})
"""Audit events of Python at which a process starts."""

_guarded: list[str] = []


def _refuse_processes(event: str, args: tuple[Any, ...]) -> None:
    if _guarded and event in STARTS:
        raise RuntimeError(f"{_guarded[0]} starts a process ({event} {args[:2]}); move it to tests/ranks")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fails a unit test that starts a process, be it in a fixture."""
    if any(folder in item.path.parents for folder in IN_PROCESS):
        _guarded.append(item.nodeid)
    try:
        return (yield)
    finally:
        _guarded.clear()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """What a shell starts in the background ignores SIGINT, and so would every run of the tests."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def together(nodeid: str) -> str:
    """What stays on one worker: a file; all contracts, which share servers; of whole runs each test for itself."""
    if nodeid.startswith("tests/contract/"):
        return "contract"
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith(RUNS) and file not in OF_ONE_RUN else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    """With several workers, what `together` says, in the order in which it was collected."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log)


@pytest.hookimpl(trylast=True)  # when the tests that were not asked for are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        numbers = Counter(together(item.nodeid) for item in items)
        items.sort(key=lambda item: (_place(together(item.nodeid)), -numbers[together(item.nodeid)]))


def _place(scope: str) -> int:
    return next((i for i, start in enumerate(LONGEST_FIRST) if scope.startswith(start)), len(LONGEST_FIRST))


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the table of arguments is built, after the tests that compare it."""
    ran = (report for reports in terminalreporter.stats.values() for report in reports)
    if not any(ARGUMENTS.name in getattr(report, "nodeid", "") for report in ran):
        return
    # Only now: it imports the configuration, which most sessions of chosen tests need not.
    from tests.unit.config.arguments import progress

    for line in progress().lines():
        terminalreporter.write_line(line)
