"""Connection to a Ray cluster that already runs: unreachable addresses, and tokens."""

import re
import socket
from typing import Any

import pytest
import ray

from rlscale.cluster import attach as attaching
from rlscale.cluster import ray_session as session
from rlscale.cluster.attach import attach, check_reachable, find_problems, running_cluster
from rlscale.cluster.cluster_address import ClusterAddress, cluster_address
from rlscale.cluster.ray_token import AUTH_MODE, is_local
from rlscale.config import ClusterConfig
from rlscale.errors import ConfigError
from rlscale.plan.placement import Layout


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_unreachable_cluster_is_reported_at_once(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"{scheme}127.0.0.1:{listening.getsockname()[1]}"
        check_reachable(address)
    layout = Layout(num_trainers=1, num_engines=0, gpus_per_engine=1, colocate=False)
    with pytest.raises(
        ConfigError, match=rf"cluster.ray_address must be the address .*, got {address}; .*nothing answers there"
    ):
        session._start(ClusterConfig(ray_address=address), layout, {})


@pytest.mark.parametrize("name", ["auto", "local", "ray://head"])
def test_ray_resolves_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    connections: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda place, **_: connections.append(place))
    check_reachable(name)
    assert connections == []


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("localhost", True), (socket.gethostname(), True), ("192.0.2.77", False), ("no.such", False)],
)
def test_addresses_of_this_machine(host: str, is_here: bool) -> None:
    assert is_local(host) is is_here


def test_the_error_names_the_token_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(attaching, "check_reachable", lambda address: None)
    for mode, names_it in ((None, True), ("token", False)):
        if mode is None:
            monkeypatch.delenv(AUTH_MODE, raising=False)
        else:
            monkeypatch.setenv(AUTH_MODE, mode)
        with pytest.raises(ConfigError) as caught:
            attach(ClusterAddress(address="192.0.2.77:6379"), {})
        text = caught.value.problems[0].fix
        assert bool(re.search("RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN", text)) is names_it


@pytest.mark.parametrize(
    ("given", "variable", "address", "source"),
    [
        (None, None, None, None),
        (None, "", None, None),
        (None, "1.2.3.4:5", "1.2.3.4:5", "RAY_ADDRESS"),
        ("auto", "1.2.3.4:5", "1.2.3.4:5", "RAY_ADDRESS"),
        ("auto", None, "auto", "cluster.ray_address"),
        ("6.7.8.9:5", "1.2.3.4:5", "6.7.8.9:5", "cluster.ray_address"),
        ("local", "1.2.3.4:5", None, None),
        (None, "local", None, None),
    ],
)
def test_the_key_takes_precedence_over_the_variable(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, address: str | None, source: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    found = cluster_address(given)
    assert (address, source) == (None, None) if found is None else (found.address, found.source) == (address, source)


def test_an_address_of_no_known_form_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ValueError("Invalid address format: banana")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError) as caught:
        attach(ClusterAddress(address="banana", source="RAY_ADDRESS"), {})
    assert str(caught.value) == (
        "RAY_ADDRESS must be the address of a running Ray cluster, got banana; start one with `ray start --head`, or "
        "leave the environment variable unset to start Ray here (Invalid address format: banana)"
    )


def test_a_cluster_that_has_ended_is_not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(attaching, "_recorded_address", lambda: address)
        assert running_cluster() == address
    assert running_cluster() is None
    monkeypatch.setattr(attaching, "_recorded_address", lambda: None)
    assert running_cluster() is None


def test_an_address_is_checked_before_ray_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert find_problems(ClusterAddress(address=f"127.0.0.1:{port}")) == []
    (closed,) = find_problems(ClusterAddress(address=f"127.0.0.1:{port}"))
    assert closed.path == "cluster.ray_address" and "nothing answers there" in closed.fix
    (named,) = find_problems(ClusterAddress(address="banana", source="RAY_ADDRESS"))
    assert named.path == "RAY_ADDRESS" and "it is not of the form <host>:<port>" in named.fix
    assert find_problems(ClusterAddress(address="ray://head")) == []

    def wait(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", wait)
    assert find_problems(ClusterAddress(address="192.0.2.77:6379")) == []  # `attach` waits longer


def test_auto_needs_a_ray_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(attaching, "running_cluster", lambda: None)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set())
    (problem,) = find_problems(ClusterAddress(address="auto"))
    assert "no Ray runs on this machine" in problem.fix
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.1:6379"})
    assert find_problems(ClusterAddress(address="auto")) == []
    # With several Ray would wait for the recorded one, which does not answer.
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.3:6379", "10.0.0.1:6379"})
    monkeypatch.setattr(attaching, "_recorded_address", lambda: "10.0.0.9:6379")
    (problem,) = find_problems(ClusterAddress(address="auto"))
    assert "10.0.0.9:6379 has ended, and several run on this machine: 10.0.0.1:6379, 10.0.0.3:6379" in problem.fix
    monkeypatch.setattr(attaching, "running_cluster", lambda: "10.0.0.2:6379")
    assert attaching._resolve("auto") == "10.0.0.2:6379"
