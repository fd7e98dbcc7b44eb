"""Settings of all tests: no network, one thread per process, a guard against processes, order for several workers."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# Set before anything imports transformers or torch. Child processes inherit these variables.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that crashes leaves a traceback in its log.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Until all tests are collected: what the imports create stays.
gc.disable()

# A deadline per example fails at random on a machine that others use, too.
settings.register_profile("rlscale", deadline=None)
settings.load_profile("rlscale")

SLOW_S = 1800  # timeout of a slow or nightly test
TESTS = Path(__file__).parent
ARGUMENTS = TESTS / "unit" / "config" / "test_arguments_csv.py"

# All tests of such a file check one run, which is a fixture of the module.
ONE_RUN_FILES = ("tests/integration/test_parts.py", "tests/integration/test_trackers.py")
RUNS = "tests/integration/test_"

# Of tests that start processes those that start first, the longest ones at the top: a long test that starts last keeps
# one worker busy alone. Only the order matters.
LONGEST_FIRST = (
    "tests/packaging/test_quickstart.py",
    "contract",
    f"{RUNS}crash.py",
    "tests/cluster/test_node_death.py",
    f"{RUNS}sglang.py::test_the_quickstart",
    "tests/cluster/test_slurm.py",
    f"{RUNS}rehearsal.py",
    "tests/ranks/benchmarks/test_memory_model.py",
    "tests/ranks/training/test_megatron_backend.py",
    "tests/cluster/test_two_nodes.py",
    f"{RUNS}trackers.py",
    f"{RUNS}parts.py",
    f"{RUNS}presets.py",
    f"{RUNS}sglang.py",
    "tests/ranks/config/test_option_precedence.py",
    f"{RUNS}algorithms.py",
    f"{RUNS}agent_examples.py::test_held_out_success_doubles[code]",
    f"{RUNS}agent_examples.py::test_held_out_success_doubles[calculator]",
    f"{RUNS}agent_examples.py::test_held_out_success_doubles[two_agents]",
    f"{RUNS}vision.py::test_counting_squares",
    f"{RUNS}agent_examples.py::test_held_out",
    "tests/packaging/test_wheel.py",
    f"{RUNS}tutorial.py",
    f"{RUNS}roles.py",
    f"{RUNS}sweeps.py",
    f"{RUNS}run.py::test_a_mixture_of_experts",
    f"{RUNS}engine_processes.py",
    f"{RUNS}external.py",
    f"{RUNS}faults.py::test_a_trainer",
    f"{RUNS}staleness.py",
    f"{RUNS}megatron.py",
)

# The checks of `bin/test --all` run next to the unit tests, which have no deadlines. Those of rlscale-doctor have, so
# that it runs next to short tests. A worker gets up to three tests ahead, so that the last ones must be short.
ORDER = (
    "tests/unit/",
    "tests/golden/",
    *LONGEST_FIRST,
    RUNS,
    "tests/cluster/",
    f"{RUNS}doctor.py",
    "",
    "tests/property/",
)
"""Beginnings of scopes in the order of their start. The longest that fits counts; files with many tests are first."""


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
    """Raises an error if a unit test or one of its fixtures starts a process."""
    if any(folder in item.path.parents for folder in IN_PROCESS):
        _guarded.append(item.nodeid)
    try:
        return (yield)
    finally:
        _guarded.clear()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Restores SIGINT and SIGHUP, which background processes of a shell ignore. Runs that tests start inherit them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def worker_scope(nodeid: str) -> str:
    """Tests of one scope run on one worker: a file, all contracts (they share servers), or one test of whole runs."""
    if nodeid.startswith("tests/contract/"):
        return "contract"
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith(RUNS) and file not in ONE_RUN_FILES else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    """Distributes tests to several workers by `worker_scope`, in the order of collection."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False

    class ScopeScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_scope(nodeid)

    return ScopeScheduling(config, log)


# Last, after pytest has removed the deselected tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        numbers = Counter(worker_scope(item.nodeid) for item in items)
        items.sort(key=lambda item: (_priority(worker_scope(item.nodeid)), -numbers[worker_scope(item.nodeid)]))


def pytest_collection_finish() -> None:
    """Excludes what imports and collection created from garbage collection, and collects more rarely.

    Collections take a tenth of the unit tests' time otherwise.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@cache
def _priority(scope: str) -> int:
    return ORDER.index(max((start for start in ORDER if scope.startswith(start)), key=len))


def pytest_itemcollected(item: pytest.Item) -> None:
    is_long = item.get_closest_marker("slow") or item.get_closest_marker("nightly")
    if is_long and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the progress of the argument table after the tests that compare it."""
    ran = (report for reports in terminalreporter.stats.values() for report in reports)
    if not any(ARGUMENTS.name in getattr(report, "nodeid", "") for report in ran):
        return
    # Imports the configuration, which most sessions with selected tests do not need.
    from tests.unit.config.arguments import progress

    for line in progress().lines():
        terminalreporter.write_line(line)
