"""Use of a Ray token, each case in its own process: Ray reads the token once a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.cluster.ray_token import AUTH_MODE

PROGRAM = """
import sys
from ray._raylet import AuthenticationMode, get_authentication_mode
from rlscale.cluster.ray_token import enable_token
host, port = sys.argv[1].split(":")
enable_token(host, int(port))
print(get_authentication_mode() == AuthenticationMode.TOKEN)
"""


def _environment(home: Path, mode: str | None = None) -> dict[str, str]:
    """Without what a Ray that another test of this process has started or joined left in it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    return env if mode is None else {**env, AUTH_MODE: mode}


@pytest.mark.parametrize(
    ("address", "has_token", "mode", "is_sent"),
    [
        ("127.0.0.1:6379", True, None, True),
        ("127.0.0.1:6379", False, None, False),
        ("127.0.0.1:6379", True, "disabled", False),
        ("192.0.2.77:6379", True, None, False),  # never sent to another machine by default
    ],
)
def test_a_token_is_sent_to_this_machine_only(
    tmp_path: Path, address: str, has_token: bool, mode: str | None, is_sent: bool
) -> None:
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    command = [sys.executable, "-c", PROGRAM, address]
    done = subprocess.run(command, env=_environment(tmp_path, mode), capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(is_sent)


@pytest.mark.parametrize(("mode", "is_sent"), [(None, False), ("disabled", False), ("token", True)])
def test_a_token_is_not_sent_to_a_cluster_that_started_without_one(
    tmp_path: Path, mode: str | None, is_sent: bool
) -> None:
    """A run with a token could create no actor there."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    # Only the name, the address and the environment of the process are those of a raylet.
    raylet = subprocess.Popen(
        ["/ray/raylet", "-c", "print(flush=True); input()", "--gcs-address=192.0.2.5:6379"],
        executable=sys.executable,
        env=_environment(tmp_path, mode),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with raylet:
        assert raylet.stdout is not None and raylet.stdout.readline()
        command = [sys.executable, "-c", PROGRAM, "127.0.0.1:6379"]
        done = subprocess.run(command, env=_environment(tmp_path), capture_output=True, text=True, check=True)
        raylet.kill()
    assert done.stdout.split()[-1] == str(is_sent)


CREATE = """
from pathlib import Path
from rlscale.cluster.ray_token import create_token
create_token()
print(Path.home().joinpath(".ray", "auth_token").read_text())
"""


def test_runs_that_start_at_the_same_time_have_one_token(tmp_path: Path) -> None:
    env, command = _environment(tmp_path), [sys.executable, "-c", CREATE]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    tokens = {process.communicate(timeout=60)[0].split()[-1] for process in processes}
    assert len(tokens) == 1 and len(tokens.pop()) >= 32
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (tmp_path / ".ray" / "auth_token").read_text()


def test_no_token_is_created_where_it_is_disabled(tmp_path: Path) -> None:
    program = "from rlscale.cluster.ray_token import create_token; create_token()"
    subprocess.run([sys.executable, "-c", program], env=_environment(tmp_path, "disabled"), check=True)
    assert list(tmp_path.iterdir()) == []
