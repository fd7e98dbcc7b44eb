"""Plugin of pytest that continues an interrupted session: what passed in the same version does not run again.

    python -m pytest -p tests.continued -m nightly tests

The nightly tests take hours. The names of those that passed are kept in the folder of pytest's cache; another commit, a
change of a tracked file, or a new file starts from zero. Needs git; without it, every session is complete.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

PHASES = frozenset({"setup", "call", "teardown"})


class _Node(Protocol):
    """A worker of pytest-xdist that is about to start."""

    workerinput: dict[str, Any]


class Continued:
    """Records what passes in a file of its version, and skips those that the file has when the session starts.

    Args:
        file: a line per test.
        before: what passed before; None: what the file holds.
    """

    def __init__(self, file: Path, before: list[str] | None = None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if before is None and file.exists() else before or []
        self._before, self._phases = frozenset(lines), dict[str, set[str]]()

    def pytest_report_header(self) -> str | None:
        if not self._before:
            return None
        return f"continued: {len(self._before)} tests passed in this version and do not run; all: rm {self._file}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: _Node) -> None:
        """All workers of pytest-xdist skip the same tests, also one that replaces another later."""
        node.workerinput["passed_before"] = sorted(self._before)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        skipped = [item for item in items if item.nodeid in self._before]
        if skipped:
            config.hook.pytest_deselected(items=skipped)
            items[:] = [item for item in items if item.nodeid not in self._before]


class _Record(Continued):
    """Of the process that reports, not of a worker."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            return
        phases = self._phases.setdefault(report.nodeid, set())
        phases.add(report.when or "")
        if phases == PHASES:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def version_of(folder: Path) -> str | None:
    """Names the commit and the changes of a checkout since; None: git knows none."""
    commands = (["rev-parse", "HEAD"], ["diff", "HEAD"], ["ls-files", "--others", "--exclude-standard"])
    digest = hashlib.sha256()
    for command in commands:
        try:
            done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        digest.update(done.stdout)
    return digest.hexdigest()[:16]


def pytest_configure(config: pytest.Config) -> None:
    workerinput: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    if workerinput is not None:
        config.pluginmanager.register(Continued(Path(), before=workerinput.get("passed_before", [])))
        return
    version = version_of(config.rootpath)
    if version is None:
        return
    folder = config.rootpath / ".pytest_cache" / "passed"
    for file in folder.glob("*.txt"):
        if file.stem != version:
            file.unlink()
    config.pluginmanager.register(_Record(folder / f"{version}.txt"))
