"""Connection to a Ray cluster that already runs: unreachable addresses, and tokens."""

import re
import socket
from typing import Any

import pytest
import ray

from rlscale.cluster import attach as attaching
from rlscale.cluster import ray_session as session
from rlscale.cluster.attach import AUTH_MODE, attach
from rlscale.config import ClusterConfig
from rlscale.errors import ConfigError
from rlscale.plan.placement import Layout


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_unreachable_cluster_is_reported_at_once(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"{scheme}127.0.0.1:{listening.getsockname()[1]}"
        attaching._check_reachable(address)
    layout = Layout(num_trainers=1, num_engines=0, gpus_per_engine=1, colocate=False)
    with pytest.raises(
        ConfigError, match=rf"cluster.ray_address must be the address .*, got {address}; .*nothing answers there"
    ):
        session._start(ClusterConfig(ray_address=address), layout)


@pytest.mark.parametrize("name", ["auto", "local", "ray://head"])
def test_ray_resolves_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    connections: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda place, **_: connections.append(place))
    attaching._check_reachable(name)
    assert connections == []


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("localhost", True), (socket.gethostname(), True), ("192.0.2.77", False), ("no.such", False)],
)
def test_addresses_of_this_machine(host: str, is_here: bool) -> None:
    assert attaching._is_local(host) is is_here


def test_the_error_names_the_token_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(attaching, "_check_reachable", lambda address: None)
    for mode, names_it in ((None, True), ("token", False)):
        if mode is None:
            monkeypatch.delenv(AUTH_MODE, raising=False)
        else:
            monkeypatch.setenv(AUTH_MODE, mode)
        with pytest.raises(ConfigError) as caught:
            attach("192.0.2.77:6379", {})
        text = caught.value.problems[0].fix
        assert bool(re.search("RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN", text)) is names_it
