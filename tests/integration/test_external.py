"""External engines: a run uses servers that are already running and leaves them alive for the next run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.models.resolve_model import resolve_model
from tests.integration.conftest import REWARDED, SMALL, Command


@contextmanager
def serve(model: str, log: Path) -> Iterator[str]:
    """Starts a server in a separate process and yields its `host:port`."""
    with log.open("w") as file:
        command = [
            sys.executable,
            "-m",
            "rlscale.cli.serve",
            "--model-path",
            model,
            "--port",
            "0",
            "--num-threads",
            "1",
        ]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                found = re.search(r"http://(127\.0\.0\.1:\d+)", log.read_text())
                if found:
                    break
            assert found, log.read_text()
            yield found[1]
            assert process.poll() is None, "the run must leave the server alive"
        finally:
            process.terminate()
            process.wait()


@pytest.mark.nightly
def test_a_run_uses_external_servers_and_leaves_them_alive(
    command: Command,
    plain: Command,
    cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLSCALE_CACHE", str(cache))
    model = resolve_model(load_config(list(SMALL)).model)
    with serve(model, command.folder / "server.log") as address:
        overrides = (REWARDED, "rollout=external", f'rollout.external_engine_addrs=["{address}"]')
        done = command.run(*overrides)
        assert done.code == 0, done.err
        assert not list((command.run_dir / "logs").glob("engine*"))
        names = ("train/loss", "reward/mean", "weights/version", "eval/reward_mean")
        ours, theirs = (
            [[record.get(name) for name in names] for record in each.metrics()] for each in (command, plain)
        )
        assert ours == theirs, "results must not depend on who starts the engine"
        again = Command(folder=tmp_path_factory.mktemp("again"), cache=cache, ray=command.ray)
        done = again.run("rollout.external=true", *overrides[2:], "debug.rollout_only=true", "eval.interval=null")
        assert done.code == 0, done.err
        assert [record["step"] for record in again.metrics()] == [0, 1, 2]


def test_a_server_that_does_not_answer_is_refused_before_anything_starts(command: Command) -> None:
    done = command.run("rollout=external", 'rollout.external_engine_addrs=["127.0.0.1:9"]')
    assert done.code == 2
    assert "rollout.external_engine_addrs must name servers that respond, got http://127.0.0.1:9 (" in done.err
