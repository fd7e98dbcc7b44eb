"""Group `sglang`: queries of other interpreters."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import load_config
from rlscale.config.passthrough.sglang_python import check_python, installed_packages, version_numbers
from tests.unit.config.config_errors import config_errors, only_error
from tests.unit.config.interpreters import add_sglang, fake_interpreter
from tests.unit.config.passthrough.test_sglang_args import SGLANG

DATACLASS = """
from dataclasses import dataclass
@dataclass
class ServerArgs:
    model_path: str
    page_size: int | None = None
    brand_new: bool = False
"""


def test_another_version_is_queried_for_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path / "cache"))
    python = fake_interpreter(tmp_path, sglang="0.6.1")
    add_sglang(tmp_path, version="0.6.1", record=DATACLASS)
    words = [SGLANG, f"sglang.python={python}"]
    assert load_config([*words, "sglang.brand_new=true"]).sglang.server_args == {"brand_new": True}
    message = only_error([*words, "sglang.deepep_mode=auto"])
    assert "an argument of SGLang 0.6.1's server" in message
    kept = json.loads((tmp_path / "cache" / "sglang_arguments-0.6.1.json").read_text())
    assert kept["types"] == {"brand_new": "bool", "model_path": "str", "page_size": "int|null"}


@pytest.mark.parametrize(
    ("has", "message"),
    [
        ({"sglang": None}, "must name an interpreter that has SGLang, got"),
        ({"sglang": "0.5.9"}, "must name an interpreter with SGLang 0.5.21 or newer, got"),
        ({"plugin": False}, "must have rlscale's platform plugin, to serve on a CPU, got"),
        ({"router": None}, "must have sglang-router, which balances the load of several engines, got"),
    ],
)
def test_missing_packages_of_an_interpreter_are_reported(tmp_path: Path, has: dict[str, Any], message: str) -> None:
    python = fake_interpreter(tmp_path, **has)
    (problem,) = check_python(str(python), serves=True, routes=True, on_cpu=True)
    assert f"sglang.python {message} {python}" in str(problem) and "bin/install-sglang-cpu" in str(problem)


def test_an_interpreter_needs_only_the_packages_of_its_tasks(tmp_path: Path) -> None:
    whole = fake_interpreter(tmp_path / "whole")
    assert check_python(str(whole), serves=True, routes=True, on_cpu=True) == []
    router_alone = fake_interpreter(tmp_path / "router", sglang=None, plugin=False)
    assert check_python(str(router_alone), serves=False, routes=True, on_cpu=True) == []
    for_gpus = fake_interpreter(tmp_path / "gpu", plugin=False, router=None)
    assert check_python(str(for_gpus), serves=True, routes=False, on_cpu=False) == []


@pytest.mark.parametrize("script", ["exit 3", "echo broken >&2; exit 1", "echo no json"])
def test_an_interpreter_that_does_not_run_is_reported(tmp_path: Path, script: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    (problem,) = check_python(str(python), serves=True, routes=False, on_cpu=True)
    assert str(problem).startswith(f"sglang.python must name a Python interpreter that runs, got {python} (")


def test_the_packages_of_this_interpreter_are_found() -> None:
    installed = installed_packages(Path(sys.executable))
    assert installed.sglang is None or version_numbers(installed.sglang) > (0,)


def test_an_invalid_interpreter_is_reported_with_the_other_errors(tmp_path: Path) -> None:
    without = fake_interpreter(tmp_path, sglang=None)
    for python in ("/no/such/python", str(without)):
        found = config_errors(SGLANG, f"sglang.python={python}", "sglang.pag_size=1", "optim.lr=-1")
        assert {line.split(" ")[0] for line in found} == {"sglang.python", "sglang.pag_size", "optim.lr"}
    elsewhere = [SGLANG, "sglang.python=/no/such/python", "cluster.ray_address=10.0.0.1:6379"]
    assert config_errors(*elsewhere) == [], "it is on the machines of the cluster"
    assert config_errors("sglang.python=/no/such/python") == [], "no key needs SGLang"
