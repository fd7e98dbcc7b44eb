"""A Ray that runs already: runs come and go, each finds what the last one gave back, and Ray stays."""

import os

import pytest

from tests.integration.conftest import REWARDED, Command
from tests.integration.ray_head import ray_head

NUM_CPUS = 2  # a trainer's and an engine's: a run that kept one would leave too few for the next


@pytest.mark.own_ray
def test_runs_use_a_ray_that_runs_already_and_leave_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every earlier run without an address has left a token, and a Ray started after it asks for one.
    (command.folder / ".ray").mkdir()
    (command.folder / ".ray" / "auth_token").write_text(os.urandom(32).hex())
    monkeypatch.setenv("HOME", str(command.folder))
    with ray_head(command.folder / "ray.log", num_cpus=NUM_CPUS) as address:
        assert "Token authentication is enabled" in (command.folder / "ray.log").read_text()
        for name in ("first", "second"):
            command.name = name
            done = command.run(REWARDED, f"cluster.ray_address={address}", "cluster.device=cpu")
            assert done.code == 0, done.err
            assert command.metrics()[-1]["step"] == 3
