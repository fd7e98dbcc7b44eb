"""Scripts in bin/: error messages, and the summary of test sessions."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.architecture import declared_distributions
from tests.packaging.checkout import ROOT, clean_environment, copy_checkout

BASH = "/bin/bash"


@pytest.mark.parametrize("script", ["quickstart", "test", "install-sglang-cpu"])
def test_an_unsupported_python_is_reported_with_advice(tmp_path: Path, script: str) -> None:
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\nexit 1\n')
    old.chmod(0o755)
    checkout = copy_checkout(tmp_path / "checkout")
    done = subprocess.run(
        [BASH, str(checkout / "bin" / script)],
        env=clean_environment(PYTHON=str(old)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"must have Python 3.11, 3.12 or 3.13, got PYTHON={old}, that is Python 3.9.1; install one" in done.stderr
    assert not list(checkout.glob(".venv*"))


def test_an_unknown_option_is_an_error_before_anything_is_created(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    done = subprocess.run(
        [BASH, str(checkout / "bin" / "test"), "--al"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "must get --all, session names or -- and pytest's arguments, got --al" in done.stderr
    assert not (checkout / ".venv").exists()


def test_the_sglang_script_takes_no_arguments(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    done = subprocess.run(
        [BASH, str(checkout / "bin" / "install-sglang-cpu"), "here"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "bin/install-sglang-cpu must get no arguments, got here" in done.stderr
    assert not list(checkout.glob(".venv*"))


LOG = """\
nox > Running session unit
FAILED tests/unit/a.py::test_b - assert 3 passed in 1.00s
============ 1 failed, 400 passed, 3 skipped, 1 warning in 20.51s ============
nox > Session unit failed
==================== 7 passed, 2 errors, 2 warnings in 61.20s (0:01:01) ====================
1 passed in 0.25s
"""


@pytest.mark.parametrize(
    ("log", "status", "line"),
    [
        (
            LOG,
            1,
            "==== A SESSION FAILED: 1 failed, 2 error, 408 passed, 3 skipped, 3 warning in 81.96s ====\n",
        ),
        ("======== 5 passed in 0.50s ========\n", 0, "==== all sessions passed: 5 passed in 0.50s ====\n"),
        ("nox > Session lint was successful.\n", 0, ""),
        (
            "arguments.csv: 2 arguments: 1 built, 1 not yet\n== 5 passed in 0.50s ==\n",
            0,
            "arguments.csv: 2 arguments: 1 built, 1 not yet\n==== all sessions passed: 5 passed in 0.50s ====\n",
        ),
    ],
)
def test_the_results_of_pytest_runs_are_summed(tmp_path: Path, log: str, status: int, line: str) -> None:
    (tmp_path / "log").write_text(log)
    command = [sys.executable, str(ROOT / "bin" / "_summary.py"), str(tmp_path / "log"), str(status)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == line


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line and line[0] != "#"}
    assert declared_distributions(ROOT / "pyproject.toml") - {"rlscale"} <= pinned


@pytest.mark.parametrize("python", ["3.11.2", "3.12.3", "3.13.5"])
def test_every_pin_installs_with_the_pythons_of_current_distributions(python: str) -> None:
    """Debian 12, Ubuntu 24.04 and Debian 13 do not update these: a pin for a later patch release breaks `bin/test`."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==")[0] for line in lines if "==" in line and line[0] != "#"]
    refused = {}
    for name in pins:
        try:
            wanted = importlib.metadata.metadata(name)["Requires-Python"]
        except importlib.metadata.PackageNotFoundError:
            continue  # only for an extra that the tests do not install
        if wanted and not SpecifierSet(wanted).contains(python):
            refused[name] = wanted
    assert refused == {}
