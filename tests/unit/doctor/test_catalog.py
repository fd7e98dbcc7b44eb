"""The catalog of checks: deadlines, names, functions, and the choice of a command line."""

import ast
from pathlib import Path

import pytest

from rlscale.doctor import catalog
from rlscale.doctor.catalog import CHECKS, MAX_TOTAL_S, select_checks

FOLDER = Path(catalog.__file__).parent


def test_all_deadlines_together_are_under_nine_minutes() -> None:
    assert MAX_TOTAL_S == 9 * 60
    assert sum(check.deadline_s for check in CHECKS) < MAX_TOTAL_S


def test_every_check_names_a_function_and_gives_advice() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        module, _, function = check.target.removeprefix("rlscale.doctor.").partition(":")
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, check.target
        assert check.advice and check.title, check.name


def test_ray_runs_in_the_last_checks_only() -> None:
    uses_ray = [check.target.startswith("rlscale.doctor.check_run:") for check in CHECKS]
    assert uses_ray == sorted(uses_ray) and sum(uses_ray) == 2
    for path in FOLDER.glob("*.py"):
        if path.name != "check_run.py":
            assert "ray_session" not in path.read_text(), path.name


def test_checks_are_selected_in_their_order() -> None:
    assert [check.name for check in select_checks(["lora", "torch"], [])] == ["torch", "lora"]
    names = [check.name for check in select_checks([], ["ray", "quickstart"])]
    assert names == [check.name for check in CHECKS][:-2]


@pytest.mark.parametrize(
    ("only", "skip", "message"),
    [
        (["lorra"], [], r"--only must name checks \(machine, .*\), got lorra"),
        ([], ["x", "ray"], r"--skip must name checks \(machine, .*\), got x"),
        (["ray"], ["ray"], "--only and --skip must leave at least one check, got none; run rlscale-doctor --list"),
    ],
)
def test_wrong_names_are_errors(only: list[str], skip: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_checks(only, skip)
