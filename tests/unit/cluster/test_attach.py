"""Joining a Ray that runs already: who is knocked at, who is told what, and where a token goes."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
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
def test_a_cluster_that_nobody_runs_is_told_at_once(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"{scheme}127.0.0.1:{listening.getsockname()[1]}"
        attaching._check_reachable(address)
    layout = Layout(num_trainers=1, num_engines=0, gpus_per_engine=1, colocate=False)
    with pytest.raises(ConfigError, match=rf"cluster.ray_address must name .*, got {address}; .*nobody answers there"):
        session._start(ClusterConfig(ray_address=address), layout)


@pytest.mark.parametrize("name", ["auto", "local", "ray://head"])
def test_names_are_left_to_ray(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    knocks: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda place, **_: knocks.append(place))
    attaching._check_reachable(name)
    assert knocks == []


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("localhost", True), (socket.gethostname(), True), ("192.0.2.77", False), ("no.such", False)],
)
def test_addresses_of_this_machine(host: str, is_here: bool) -> None:
    assert attaching._is_here(host) is is_here


ASK = """
import sys
from ray._raylet import AuthenticationMode, get_authentication_mode
from rlscale.cluster.attach import _take_token
_take_token(sys.argv[1])
print(get_authentication_mode() == AuthenticationMode.TOKEN)
"""


@pytest.mark.parametrize(
    ("address", "has_token", "mode", "shows_it"),
    [
        ("127.0.0.1:6379", True, None, True),
        ("127.0.0.1:6379", False, None, False),
        ("127.0.0.1:6379", True, "disabled", False),
        ("192.0.2.77:6379", True, None, False),  # another machine gets no token unasked
    ],
)
def test_a_token_goes_to_this_machine_alone(
    tmp_path: Path, address: str, has_token: bool, mode: str | None, shows_it: bool
) -> None:
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    env = {**os.environ, "HOME": str(tmp_path), **({} if mode is None else {AUTH_MODE: mode})}
    done = subprocess.run([sys.executable, "-c", ASK, address], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(shows_it)


def test_who_may_lack_a_token_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(attaching, "_check_reachable", lambda address: None)
    for mode, is_told in ((None, True), ("token", False)):
        if mode is None:
            monkeypatch.delenv(AUTH_MODE, raising=False)
        else:
            monkeypatch.setenv(AUTH_MODE, mode)
        with pytest.raises(ConfigError) as caught:
            attach("192.0.2.77:6379", {})
        text = caught.value.problems[0].fix
        assert bool(re.search("RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN", text)) is is_told
