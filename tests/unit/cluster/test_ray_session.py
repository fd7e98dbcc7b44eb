"""Start of Ray, and the environment of its workers."""

import os
from dataclasses import replace
from typing import Any

import pytest
import ray

from rlscale.cluster import ray_session as session
from rlscale.cluster.ray_session import PASSIVE_OMP_ENV, environment, worker_env
from rlscale.config import ClusterConfig, Device
from rlscale.errors import ConfigError, WorkerError
from rlscale.plan.placement import Layout


def test_worker_variables_are_set_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, value), *_ = PASSIVE_OMP_ENV.items()
    monkeypatch.delenv(name, raising=False)
    with environment(PASSIVE_OMP_ENV):
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "another")
    with environment(PASSIVE_OMP_ENV):
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


def test_threads_do_not_spin_when_trainer_and_engines_share_the_cores() -> None:
    config = ClusterConfig(device=Device.cpu, spin_threads=True)
    assert "GOMP_SPINCOUNT" not in worker_env(config, may_spin=False)


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
    assert slow.addresses == ["local", "local", "local"]  # never the address of a cluster or of a failed attempt


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


def test_an_engine_larger_than_every_node_is_refused_before_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": 4.0}}, {"Alive": True, "Resources": {"GPU": 4.0}}]
    nodes += [{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": False, "Resources": {"GPU": 8.0}}]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    layout = Layout(num_trainers=0, num_engines=1, gpus_per_engine=8, colocate=False)
    with pytest.raises(ConfigError, match=r"1 x 8 GPUs of one node\), got 2 nodes with 4, 4 GPUs; .* set it to 4"):
        session._check_capacity(ClusterConfig(device=Device.cuda), layout)
    session._check_capacity(ClusterConfig(device=Device.cuda), replace(layout, gpus_per_node=4))


def test_a_cluster_that_is_not_used_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", SlowRay(0).init)
    monkeypatch.setattr(session, "running_cluster", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(session, "create_token", lambda: None)
    layout = Layout(num_trainers=1, num_engines=0, gpus_per_engine=1, colocate=False)
    session._start(ClusterConfig(), layout, {})
    assert "a Ray cluster runs on this machine at 10.0.0.1:6379; this run starts a separate Ray." in caplog.text
    assert "cluster.ray_address=auto" in caplog.text
    caplog.clear()
    session._start(ClusterConfig(ray_address="local"), layout, {})
    assert caplog.text == ""
