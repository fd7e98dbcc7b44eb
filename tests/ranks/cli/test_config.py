"""Completion in a shell."""

import os
import subprocess
import sys
from pathlib import Path


def test_completion_in_a_shell(tmp_path: Path) -> None:
    script = 'eval "$(rlscale-train -sc install=bash)"; COMP_LINE="rlscale-train algo=gs" COMP_CWORD=1'
    script += '; hydra_bash_completion; echo "${COMPREPLY[@]}"'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True, env={"PATH": path}
    )
    assert done.stdout.strip() == "algo=gspo", done.stderr
