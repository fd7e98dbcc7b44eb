"""The command `rlscale-serve`: imports at start-up."""

import subprocess
import sys


def test_no_transformers_at_the_start() -> None:
    # Importing it would more than double the time until the server is ready.
    code = "import sys, rlscale.cli.serve; sys.exit('transformers' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
