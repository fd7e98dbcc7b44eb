"""Start of Ray, and the environment of its workers."""

import os
from typing import Any

import pytest
import ray

from rlscale.cluster import ray_session as session
from rlscale.cluster.ray_session import PASSIVE_OMP_ENV, _environment, worker_env
from rlscale.config import ClusterConfig, Device
from rlscale.errors import WorkerError


def test_worker_variables_are_set_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, value), *_ = PASSIVE_OMP_ENV.items()
    monkeypatch.delenv(name, raising=False)
    with _environment(PASSIVE_OMP_ENV):
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "another")
    with _environment(PASSIVE_OMP_ENV):
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
def test_waiting_threads_sleep_by_default(config: ClusterConfig, spins: bool) -> None:
    variables = worker_env(config)
    assert variables["OMP_WAIT_POLICY"] == "passive"
    assert ("GOMP_SPINCOUNT" in variables) == spins


class SlowRay:
    """Ray on a machine that is too busy for the first few starts."""

    def __init__(self, num_slow: int) -> None:
        self.addresses: list[str | None] = []
        self._num_slow = num_slow

    def init(self, *, address: str | None, **options: Any) -> None:
        self.addresses.append(address)
        if len(self.addresses) <= self._num_slow:
            raise Exception("The current node timed out during startup. This could happen because ...")


def test_a_start_that_is_too_slow_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(2)
    monkeypatch.setattr(ray, "init", slow.init)
    session._start_local({})
    assert slow.addresses == [None, "local", "local"]  # never the address of a failed attempt


def test_a_failed_start_of_ray_ends_the_run_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(99)
    monkeypatch.setattr(ray, "init", slow.init)
    with pytest.raises(
        WorkerError, match=r"Ray: did not start on this machine in 3 attempts .* cluster.ray_address=auto"
    ):
        session._start_local({})
    assert len(slow.addresses) == session.LOCAL_STARTS


def test_other_failures_of_the_start_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="no such option"):
        session._start_local({})
