"""Records the origin of a run: config, overrides, package versions, state of the code, machine.

The driver writes it into the run folder before anything starts. Values of settings that look like secrets are redacted.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlscale.errors import DataError
from rlscale.secrets import redact_override, redact_yaml

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
PACKAGES = ("rlscale", "torch", "transformers", "ray", "hydra-core", "numpy")
_GIT_TIMEOUT_S = 5.0


def git_state(folder: Path) -> dict[str, Any] | None:
    """Root, commit and dirty flag of the checkout that contains `folder`. None outside of a checkout.

    A folder that git ignores (a virtual environment inside a checkout) is not part of that checkout.
    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None or _git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    status = _git(folder, "status", "--porcelain")
    return {
        "root": root,
        "commit": _git(folder, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


GitReader = Callable[[Path], dict[str, Any] | None]
"""Signature of `git_state`."""


def write_provenance(
    folder: Path, *, config_yaml: str, overrides: Sequence[str] = (), read_git: GitReader = git_state
) -> None:
    """Writes `config.yaml` and appends one entry to the list in `provenance.json`. A resumed run has several entries.

    Args:
        config_yaml: the resolved config.
        overrides: the overrides of the command line.
        read_git: reads the state of the checkout that contains a folder.

    Raises DataError if the entries of earlier starts cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG_FILE, redact_yaml(config_yaml))
    launches = [*_read_starts(folder), collect(overrides, read_git=read_git)]
    _replace(folder / PROVENANCE_FILE, json.dumps(launches, indent=2) + "\n")


def count_starts(folder: Path) -> int:
    """Starts of the run so far."""
    return len(_read_starts(folder))


def _read_starts(folder: Path) -> list[dict[str, Any]]:
    path = folder / PROVENANCE_FILE
    if not path.exists():
        return []
    try:
        starts = json.loads(text := path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        starts = None
    if not isinstance(starts, list):
        raise DataError(f"{path} must be a list of the starts of the run, got {text[:40]!r}; correct or remove it")
    return starts


def collect(overrides: Sequence[str] = (), *, read_git: GitReader = git_state) -> dict[str, Any]:
    """Entry for this start of the run and this process, as JSON values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": Path(sys.argv[0]).name,
        "overrides": [redact_override(text) for text in overrides],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git": {"rlscale": read_git(Path(__file__).parent), "working_directory": read_git(Path.cwd())},
        "host": {"name": platform.node(), "platform": platform.platform(), "num_cpus": os.cpu_count()},
        "process": os.getpid(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *args: str) -> str | None:
    """Output of a git command. None when the command fails, takes too long, or git is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _replace(path: Path, text: str) -> None:
    # The rename makes the replacement atomic: readers see the old file or the new one.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
