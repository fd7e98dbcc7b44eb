"""Settings of every test: no network, one thread per process, markers by folder."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Before anything imports transformers or torch; child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that crashes leaves a traceback in its log.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

INTEGRATION = Path(__file__).parent / "integration"
ARGUMENTS = Path(__file__).parent / "unit" / "config" / "test_arguments_csv.py"


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """What a shell starts in the background ignores SIGINT, and so would every run of the tests."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    """With several workers, the tests of a file stay together, and all of the contracts, which share servers."""

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "contract" if nodeid.startswith("tests/contract/") else str(super()._split_scope(nodeid))

    return Together(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.integration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the table of arguments is built, after the tests that compare it."""
    ran = (report for reports in terminalreporter.stats.values() for report in reports)
    if not any(ARGUMENTS.name in getattr(report, "nodeid", "") for report in ran):
        return
    # Only now: it imports the configuration, which most sessions of chosen tests need not.
    from tests.unit.config.arguments import progress

    for line in progress().lines():
        terminalreporter.write_line(line)
