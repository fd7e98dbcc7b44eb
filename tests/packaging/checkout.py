"""Copies the checkout without private files. Contains no tests."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PRIVATE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSAFEPATH")


def copy_checkout(target: Path) -> Path:
    """Copies the files that git would commit, in their current state, without environments and build folders."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def clean_environment(**more: str) -> dict[str, str]:
    """Environment variables of a shell without an active Python environment."""
    return {name: value for name, value in os.environ.items() if name not in _PRIVATE} | more
