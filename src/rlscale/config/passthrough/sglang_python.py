"""The interpreter that has SGLang, and what it has installed. It may be another one than that which runs this."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlscale.errors import Problem

LOWEST = (0, 5, 21)
"""The first version whose weight updates are enclosed by begin and end calls."""

PLATFORM = "rlscale_cpu"
"""Name under which our platform plugin is installed."""

INSTALL = "run bin/install-sglang-cpu, or set sglang.python to an interpreter that has it"
TIMEOUT_S = 60

_CHECKOUT = Path(__file__).resolve().parents[4]
_LOOK = """
import json
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
plugins = [e.name for e in metadata.entry_points(group="sglang.srt.platforms")]
print(json.dumps({"sglang": version("sglang"), "router": version("sglang-router"), "plugins": plugins}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What an interpreter has, without importing it. None: not installed."""

    sglang: str | None
    router: str | None
    plugins: tuple[str, ...] = ()


def find_python(given: str | None) -> Path:
    """The interpreter that `sglang.python` names, or what None stands for. It need not exist."""
    if given is not None:
        return Path(given).expanduser().absolute()
    made = _CHECKOUT / ".venv-sglang" / "bin" / "python"
    if importlib.util.find_spec("sglang") is None and made.exists():
        return made
    return Path(sys.executable)


def foreign_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for another interpreter, without what would make it import this one's packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in environment.items() if name not in ours}


@cache
def look_into(python: Path) -> Installed:
    """Asks an interpreter what it has; takes about 0.1 s.

    Raises OSError, subprocess.SubprocessError or ValueError when it cannot be run or answers something else.
    """
    done = subprocess.run(
        [str(python), "-c", _LOOK],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        env=foreign_environment(os.environ),
    )
    answer = json.loads(done.stdout)
    return Installed(sglang=answer["sglang"], router=answer["router"], plugins=tuple(answer["plugins"]))


def check_python(given: str | None, *, serves: bool, routes: bool, on_cpu: bool) -> list[Problem]:
    """What keeps the interpreter that `sglang.python` stands for from its tasks.

    Args:
        serves: whether it is to run SGLang.
        routes: whether it is to run sglang-router.
        on_cpu: whether SGLang is to serve on a CPU, for which it needs our platform plugin.
    """
    python = find_python(given)

    def problem(rule: str, value: str, fix: str = INSTALL) -> list[Problem]:
        return [Problem(path="sglang.python", rule=rule, value=value, fix=fix)]

    try:
        installed = look_into(python)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return problem("name a Python interpreter that runs", f"{python} ({_first_line(error)})")
    if serves and installed.sglang is None:
        return problem("name an interpreter that has SGLang", f"{python}, which has none")
    if serves and version_numbers(installed.sglang or "") < LOWEST:
        lowest = ".".join(map(str, LOWEST))
        return problem(f"name an interpreter with SGLang {lowest} or newer", f"{python} with {installed.sglang}")
    if serves and on_cpu and PLATFORM not in installed.plugins:
        return problem("have rlscale's platform plugin, to serve on a CPU", f"{python} without it")
    if routes and installed.router is None:
        fix = "run bin/install-sglang-cpu, install sglang-router there, or set router.enabled=false"
        return problem("have sglang-router, which stands before several engines", f"{python} without it", fix)
    return []


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.5.23.post1` -> (0, 5, 23)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        return lines[-1] if lines else f"exit status {error.returncode}"
    return str(error).splitlines()[0]
