"""Arguments of a library: recorded for the tested version, queried from any other installed version."""

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
class LibraryArguments:
    """Types by name, in the text form of describe.py, e.g. `list[int]|null`."""

    version: str
    types: Mapping[str, str]


@cache
def read_recorded(file: Path) -> LibraryArguments:
    """Reads the arguments of the tested version from a file next to this module."""
    return _parse(file.read_text(encoding="utf-8"))


def query_interpreter(
    interpreter: Path, *, version: str, distribution: str, classes: Sequence[str], kind: str = "arguments"
) -> LibraryArguments:
    """The arguments of the installed version, cached in a file: the query takes as long as importing the library.

    Args:
        interpreter: a Python that has the library.
        version: version of the library, for the name of the cached file.
        distribution: name of the installed distribution.
        classes: the classes whose fields are the arguments, each `module:name`.
        kind: of the arguments, for the name of the cached file.

    Raises: OSError, subprocess.SubprocessError or ValueError when the interpreter fails or prints anything else.
    """
    root = os.environ.get("RLSCALE_CACHE")
    folder = Path(root) if root else Path.home() / ".cache" / "rlscale"
    cached = folder / f"{distribution}_{kind}-{version}.json"
    if not cached.exists():
        done = subprocess.run(
            [str(interpreter), str(DESCRIBE), distribution, *classes],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
            env=foreign_environment(os.environ),
        )
        # Parse before writing, so that the cache never contains invalid text.
        _parse(done.stdout)
        folder.mkdir(parents=True, exist_ok=True)
        # Several processes may query at once: each writes its own file and renames it.
        temporary = cached.with_suffix(f".{os.getpid()}")
        temporary.write_text(done.stdout, encoding="utf-8")
        temporary.replace(cached)
    return _parse(cached.read_text(encoding="utf-8"))


def _parse(text: str) -> LibraryArguments:
    raw = json.loads(text)
    return LibraryArguments(version=raw["version"], types=MappingProxyType(raw["types"]))
