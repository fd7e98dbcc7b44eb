import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_committed_files_are_what_the_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.make_arithmetic", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
