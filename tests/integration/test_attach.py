"""Runs that attach to a running Ray: each releases its resources for the next one, and Ray stays alive."""

import os

import pytest

from tests.integration.conftest import REWARDED, Command
from tests.integration.ray_head import ray_head

NUM_CPUS = 2  # one trainer and one engine: a run that kept a CPU would leave too few for the next


@pytest.mark.own_ray
def test_runs_attach_to_a_running_ray_and_leave_it_alive(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run without an address leaves a token file, and a Ray started after it requires the token.
    (command.folder / ".ray").mkdir()
    (command.folder / ".ray" / "auth_token").write_text(os.urandom(32).hex())
    monkeypatch.setenv("HOME", str(command.folder))
    # A test that started Ray in this process has left it.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with ray_head(command.folder / "ray.log", num_cpus=NUM_CPUS) as address:
        assert "Token authentication is enabled" in (command.folder / "ray.log").read_text()
        for name in ("first", "second"):
            command.name = name
            done = command.run(REWARDED, f"cluster.ray_address={address}", "cluster.device=cpu")
            assert done.code == 0, done.err
            assert command.metrics()[-1]["step"] == 3
