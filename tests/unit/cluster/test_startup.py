"""What keeps a run's start short."""

import os
import subprocess
import sys

import pytest

from rlscale.cluster.session import WORKER_VARIABLES, _inherited


def test_the_driver_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, rlscale.trainer; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_variables_for_workers_are_there_while_ray_starts_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, value), *_ = WORKER_VARIABLES.items()
    monkeypatch.delenv(name, raising=False)
    with _inherited(WORKER_VARIABLES):
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "another")
    with _inherited(WORKER_VARIABLES):
        assert os.environ[name] == value
    assert os.environ[name] == "another"
