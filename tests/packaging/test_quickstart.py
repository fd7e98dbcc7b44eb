"""`bin/quickstart` in a fresh copy: creates its environment, trains, and prints the result.

Nightly, since `.ci/run` begins with `bin/quickstart` in its own clone.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.checkout import clean_environment, copy_checkout

pytestmark = pytest.mark.nightly


def test_a_fresh_copy_installs_and_trains_and_does_not_install_again(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    environment = clean_environment(RLSCALE_CACHE=str(tmp_path / "cache"))
    script = str(checkout / "bin" / "quickstart")
    done = subprocess.run([script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = re.search(r"held-out reward\s+([\d.]+) before, ([\d.]+) after", done.stdout)
    assert rewards is not None, done.stdout
    before, after = map(float, rewards.groups())
    assert 0.1 <= before <= 0.4
    assert after >= 0.9
    assert "activate" in done.stderr
    again = subprocess.run(
        [script, "--cfg", "job"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "Installing" not in again.stderr
