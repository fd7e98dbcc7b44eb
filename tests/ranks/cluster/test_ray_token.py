"""Use of a Ray token, each case in its own process: Ray reads the token once a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.cluster.attach import AUTH_MODE

PROGRAM = """
import sys
from ray._raylet import AuthenticationMode, get_authentication_mode
from rlscale.cluster.attach import _enable_token
_enable_token(sys.argv[1])
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
