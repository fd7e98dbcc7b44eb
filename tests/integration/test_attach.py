"""Runs that attach to a running Ray: each releases its resources for the next one, and Ray stays alive."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.integration.conftest import REWARDED, Command
from tests.integration.ray_head import ray_head

NUM_CPUS = 2  # one trainer and one engine: a run that kept a CPU would leave too few for the next


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Not in pytest's folder: paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield folder


@pytest.mark.nightly
@pytest.mark.own_ray
def test_runs_attach_to_a_running_ray_and_leave_it_alive(
    command: Command, monkeypatch: pytest.MonkeyPatch, short_folder: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    # A run without an address leaves a token file, and a Ray started after it requires the token.
    (command.folder / ".ray").mkdir()
    (command.folder / ".ray" / "auth_token").write_text(os.urandom(32).hex())
    monkeypatch.setenv("HOME", str(command.folder))
    # A test that started Ray in this process has left it.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with ray_head(command.folder / "ray.log", num_cpus=NUM_CPUS) as address:
        assert "Token authentication is enabled" in (command.folder / "ray.log").read_text()
        # A run without an address starts a Ray for itself, and the next one finds the first Ray unchanged.
        addresses = {"first": address, "separate": None, "second": address}
        for command.name, given in addresses.items():
            done = command.run(REWARDED, "cluster.device=cpu", *([f"cluster.ray_address={given}"] if given else []))
            assert done.code == 0, done.err
            assert command.metrics()[-1]["step"] == 3
            is_separate = "this run starts a separate Ray. To use the cluster, set cluster.ray_address=auto" in done.err
            assert is_separate == (given is None)
