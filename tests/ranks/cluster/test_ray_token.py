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
    env = {**os.environ, "HOME": str(tmp_path), **({} if mode is None else {AUTH_MODE: mode})}
    done = subprocess.run([sys.executable, "-c", PROGRAM, address], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(is_sent)


@pytest.mark.parametrize(("mode", "is_sent"), [(None, False), ("disabled", False), ("token", True)])
def test_a_token_is_not_sent_to_a_cluster_that_started_without_one(
    tmp_path: Path, mode: str | None, is_sent: bool
) -> None:
    """A run with a token could create no actor there."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    env = {name: value for name, value in os.environ.items() if name != AUTH_MODE}
    # Only the name, the address and the environment of the process are those of a raylet.
    raylet = subprocess.Popen(
        ["/ray/raylet", "-c", "print(flush=True); input()", "--gcs-address=192.0.2.5:6379"],
        executable=sys.executable,
        env=env if mode is None else {**env, AUTH_MODE: mode},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with raylet:
        assert raylet.stdout is not None and raylet.stdout.readline()
        command = [sys.executable, "-c", PROGRAM, "127.0.0.1:6379"]
        done = subprocess.run(command, env={**env, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True)
        raylet.kill()
    assert done.stdout.split()[-1] == str(is_sent)


CREATE = """
from pathlib import Path
from rlscale.cluster.ray_token import create_token
create_token()
print(Path.home().joinpath(".ray", "auth_token").read_text())
"""


def test_runs_that_start_at_the_same_time_have_one_token(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", CREATE]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    tokens = {process.communicate(timeout=60)[0].split()[-1] for process in processes}
    assert len(tokens) == 1 and len(tokens.pop()) >= 32
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (tmp_path / ".ray" / "auth_token").read_text()


def test_no_token_is_created_where_it_is_disabled(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), AUTH_MODE: "disabled"}
    program = "from rlscale.cluster.ray_token import create_token; create_token()"
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    assert list(tmp_path.iterdir()) == []
