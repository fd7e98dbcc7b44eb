"""What keeps a run's start short."""

import os
import subprocess
import sys
from typing import Any

import pytest
import ray

from rlscale.cluster import ray_session as session
from rlscale.cluster.ray_session import PASSIVE_OMP_ENV, _inherited, worker_variables
from rlscale.config import ClusterConfig, Device
from rlscale.errors import WorkerError


def test_the_driver_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, rlscale.driver.trainer; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_variables_for_workers_are_there_while_ray_starts_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, value), *_ = PASSIVE_OMP_ENV.items()
    monkeypatch.delenv(name, raising=False)
    with _inherited(PASSIVE_OMP_ENV):
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "another")
    with _inherited(PASSIVE_OMP_ENV):
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


class SlowRay:
    """Ray's start on a machine that is too busy for the first few times."""

    def __init__(self, num_slow: int) -> None:
        self.addresses: list[str | None] = []
        self._num_slow = num_slow

    def init(self, *, address: str | None, **options: Any) -> None:
        self.addresses.append(address)
        if len(self.addresses) <= self._num_slow:
            raise Exception("The current node timed out during startup. This could happen because ...")


def test_ray_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(2)
    monkeypatch.setattr(ray, "init", slow.init)
    session._init_here({})
    assert slow.addresses == [None, "local", "local"]  # never the leftovers of the attempt before


def test_ray_that_does_not_start_ends_the_run_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(99)
    monkeypatch.setattr(ray, "init", slow.init)
    with pytest.raises(WorkerError, match=r"Ray: did not start on this machine, 3 times .* cluster.ray_address=auto"):
        session._init_here({})
    assert len(slow.addresses) == session.LOCAL_STARTS


def test_other_failures_of_rays_start_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="no such option"):
        session._init_here({})


def test_an_engine_imports_no_configuration() -> None:
    code = "import sys, rlscale.cli.serve; print(sorted({'hydra', 'pydantic', 'rlscale.config'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
