"""What keeps a run's start short."""

import os
import subprocess
import sys

import pytest

from rlscale.cluster.session import SLEEPING, _inherited, worker_variables
from rlscale.config import ClusterConfig, Device


def test_the_driver_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, rlscale.trainer; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_variables_for_workers_are_there_while_ray_starts_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, value), *_ = SLEEPING.items()
    monkeypatch.delenv(name, raising=False)
    with _inherited(SLEEPING):
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "another")
    with _inherited(SLEEPING):
        assert os.environ[name] == value
    assert os.environ[name] == "another"


@pytest.mark.parametrize(
    ("config", "spins"),
    [
        (ClusterConfig(device=Device.cpu), False),
        (ClusterConfig(device=Device.cpu, spin_threads=True), True),
        (ClusterConfig(device=Device.cuda, spin_threads=True), False),
    ],
)
def test_waiting_threads_sleep_unless_told_to_spin(config: ClusterConfig, spins: bool) -> None:
    variables = worker_variables(config)
    assert variables["OMP_WAIT_POLICY"] == "passive"
    assert ("GOMP_SPINCOUNT" in variables) == spins
