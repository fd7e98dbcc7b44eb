"""Runs behind the middleware router: middlewares of users, the death of the router and of an engine."""

import os
import signal

import pytest

from tests.integration.conftest import Command
from tests.integration.test_faults import wait_for_training

pytestmark = pytest.mark.own_ray

MIDDLEWARE = '''
from pathlib import Path

class Record:
    """Writes the session of each request, and the process, into a file."""

    def __init__(self, app, *, router):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/generate":
            import os
            key = dict(scope["headers"])[b"x-smg-routing-key"].decode()
            with Path("sessions.txt").open("a") as file:
                file.write(f"{os.getpid()} {key}\\n")
        await self.app(scope, receive, send)
'''
BEHIND_IT = (
    "router.use_middleware_router=true",
    "router.policy=consistent_hashing",
    "cluster.rollout_num_gpus=2",
    "eval.interval=null",
)
CACHE = "rlscale.engines.middleware_router.radix_tree_middleware:RadixTreeMiddleware"


@pytest.mark.nightly
def test_requests_pass_the_middlewares_and_a_dead_router_and_engine_are_restarted(command: Command) -> None:
    (command.folder / "record_sessions.py").write_text(MIDDLEWARE)
    paths = f'router.middleware_paths=["record_sessions:Record","{CACHE}"]'
    process = command.start(*BEHIND_IT, paths, "fault_tolerance.enabled=true", "data.num_rollout=60")
    wait_for_training(command, process)
    for part in ("serve_router", "rlscale.cli.serve"):
        os.kill(next(pid for pid, words in command.processes().items() if part in words), signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "restarting engine" in out
    lines = [line.split() for line in (command.folder / "sessions.txt").read_text().splitlines()]
    assert len({pid for pid, _ in lines}) == 2, "the requests went through the router and the one that replaced it"
    # A dead engine or router may be asked for a group again.
    assert {f"train-{group}" for group in range(60 * 4)} == {key for _, key in lines}
    assert len(command.metrics()) == 60
    assert command.processes() == {}


@pytest.mark.parametrize(
    ("path", "reason"),
    [("no_such_module:Record", "must be importable"), ("pathlib:Path.cwd", "must be"), ("os:sep", "is of type str")],
)
def test_a_middleware_that_cannot_be_used_ends_the_command_before_ray(command: Command, path: str, reason: str) -> None:
    done = command.run(*BEHIND_IT, f'router.middleware_paths=["{path}"]')
    assert done.code == 2 and "Traceback" not in done.err
    assert "router.middleware_paths.0" in done.err and reason in done.err, done.err
    assert not command.run_dir.exists()
