"""A Ray that runs already: runs come and go, each finds what the last one gave back, and Ray stays."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import REWARDED, Command

NUM_CPUS = 2  # a trainer's and an engine's: a run that kept one would leave too few for the next


@contextmanager
def ray_head(log: Path) -> Iterator[str]:
    """A Ray in a process of its own; its address."""
    # Not below pytest's folder: names of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, log.open("w") as file:
        words = ["--head", "--port=0", f"--num-cpus={NUM_CPUS}", "--num-gpus=0", f"--temp-dir={folder}", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--include-dashboard=false"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            ends = time.monotonic() + 90
            found = None
            while found is None and process.poll() is None and time.monotonic() < ends:
                found = re.search(r"ray start --address='([\d.:]+)'", log.read_text())
                time.sleep(0.1)
            assert found, log.read_text()
            yield found[1]
            assert process.poll() is None, "the run must leave Ray alive"
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_runs_use_a_ray_that_runs_already_and_leave_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every earlier run without an address has left a token, and a Ray started after it asks for one.
    (command.folder / ".ray").mkdir()
    (command.folder / ".ray" / "auth_token").write_text(os.urandom(32).hex())
    monkeypatch.setenv("HOME", str(command.folder))
    with ray_head(command.folder / "ray.log") as address:
        assert "Token authentication is enabled" in (command.folder / "ray.log").read_text()
        for name in ("first", "second"):
            command.name = name
            done = command.run(REWARDED, f"cluster.ray_address={address}", "cluster.device=cpu")
            assert done.code == 0, done.err
            assert command.metrics()[-1]["step"] == 3
