"""The check of sandboxes before a run starts."""

from pathlib import Path

import pytest

from rlscale.config import RunConfig, load_config
from rlscale.driver.preflight import check_sandbox
from rlscale.errors import Problem
from rlscale.sandboxes import open_sandboxes


def config(*overrides: str) -> RunConfig:
    return load_config(["experiment=quickstart", *overrides])


def test_sandboxes_that_start_are_no_problem() -> None:
    assert check_sandbox(config("sandbox.kind=subprocess")) == []


def test_nothing_is_started_without_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sandboxes, "find_sandbox_fault", lambda _: pytest.fail("started a sandbox"))
    assert check_sandbox(config()) == []


def test_a_folder_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check_sandbox(config("sandbox.kind=subprocess", f"sandbox.read_only_folders=[{tmp_path}/gone]"))
    assert str(problem).startswith(f"sandbox.read_only_folders must name existing folders, got {tmp_path}/gone; ")
    (problem,) = check_sandbox(config("sandbox.kind=subprocess", f"sandbox.read_only_folders=[{__file__}]"))
    assert str(problem).startswith("sandbox.read_only_folders must name existing folders, got ")


def test_sandboxes_that_do_not_start_are_a_problem_with_the_reason() -> None:
    broken = config("sandbox.kind=subprocess").writable_copy()
    # A rule refuses it, because the file system of a sandbox has no place for it.
    broken.sandbox.read_only_folders = ["/proc/sys/kernel"]
    (problem,) = check_sandbox(broken)
    assert isinstance(problem, Problem) and problem.path == "sandbox.kind"
    assert "subprocess (a sandbox did not start: " in problem.value and "/proc" in problem.value
