"""What a library takes: recorded for the tested version, and asked for where another one is installed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from rlscale.config.passthrough.sglang_python import TIMEOUT_S, foreign_environment

DESCRIBE = Path(__file__).with_name("describe.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Types by name, as the text that describe.py makes, e.g. `list[int]|null`."""

    version: str
    types: Mapping[str, str]


@cache
def recorded(file: Path) -> Arguments:
    """Those of the tested version, from a file beside this one."""
    return _parse(file.read_text(encoding="utf-8"))


def ask(interpreter: Path, *, version: str, distribution: str, classes: Sequence[str]) -> Arguments:
    """Those of the installed version. Asked once and kept in the cache folder, as it takes the library's import.

    Args:
        interpreter: that has the library.
        version: of the library, for the name of the file that is kept.
        distribution: the library's name as it is installed.
        classes: whose fields are the arguments, each `module:name`.

    Raises OSError, subprocess.SubprocessError or ValueError when the interpreter cannot be run or answers otherwise.
    """
    root = os.environ.get("RLSCALE_CACHE")
    folder = Path(root) if root else Path.home() / ".cache" / "rlscale"
    kept = folder / f"{distribution}_arguments-{version}.json"
    if not kept.exists():
        done = subprocess.run(
            [str(interpreter), str(DESCRIBE), distribution, *classes],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
            env=foreign_environment(os.environ),
        )
        _parse(done.stdout)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_text(done.stdout, encoding="utf-8")
        temporary.replace(kept)
    return _parse(kept.read_text(encoding="utf-8"))


def _parse(text: str) -> Arguments:
    raw = json.loads(text)
    return Arguments(version=raw["version"], types=MappingProxyType(raw["types"]))
