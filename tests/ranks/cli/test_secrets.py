"""A command restarts without the secrets on its command line."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_command_restarts_without_the_secret(tmp_path: Path) -> None:
    """Run as a user does; `main_train` is replaced by a program that shows what others see of its process."""
    code = """
import sys
from pathlib import Path
import rlscale.cli.train as train
train.main_train = lambda argv, **_: sys.stdout.write(Path("/proc/self/cmdline").read_text().replace("\\0", " ")) * 0
train.main()
"""
    script = tmp_path / "command.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-X", "utf8", str(script), "algo=gspo", "logging.wandb.key=abc123"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert "abc123" not in done.stdout
    assert done.stdout.strip().endswith("algo=gspo logging.wandb.key=${oc.env:RLSCALE_SECRET_0}")
    assert "-X utf8" in done.stdout
