"""The interpreter of SGLang, which may differ from this one, and the packages installed in it."""

from __future__ import annotations

import errno
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

# src/rlscale/config/passthrough/sglang_python.py: four levels up is the repository.
_CHECKOUT = Path(__file__).resolve().parents[4]
_PRINT_PACKAGES = """
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
class InstalledPackages:
    """Versions of packages in an interpreter. None: not installed."""

    sglang: str | None
    router: str | None
    plugins: tuple[str, ...] = ()


def find_python(given: str | None) -> Path:
    """The interpreter of `sglang.python`, which may not exist.

    None: this interpreter if it has SGLang, else `.venv-sglang` of the repository if it exists.
    """
    if given is not None:
        return Path(given).expanduser().absolute()
    made = _CHECKOUT / ".venv-sglang" / "bin" / "python"
    # find_spec locates SGLang without importing it, which would take seconds.
    if importlib.util.find_spec("sglang") is None and made.exists():
        return made
    return Path(sys.executable)


FIRST_VARIABLE = "RLSCALE_STARTED"


def foreign_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for another interpreter, without the variables that make it import packages of this one.

    Its first variable is one that no process changes. SGLang's processes name themselves ("sglang::router") with
    setproctitle, which silently does nothing once the first variable was changed or removed: it finds the arguments
    of the process in the memory before it.
    """
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {FIRST_VARIABLE: "1"} | {name: value for name, value in environment.items() if name not in ours}


@cache
def installed_packages(python: Path) -> InstalledPackages:
    """Queries an interpreter for its packages without importing them; takes about 0.1 s.

    Raises: OSError, subprocess.SubprocessError or ValueError when it fails or prints anything else.
    """
    if not python.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(python))
    done = subprocess.run(
        [str(python), "-c", _PRINT_PACKAGES],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        env=foreign_environment(os.environ),
    )
    answer = json.loads(done.stdout)
    return InstalledPackages(sglang=answer["sglang"], router=answer["router"], plugins=tuple(answer["plugins"]))


def check_python(given: str | None, *, serves: bool, routes: bool, on_cpu: bool) -> list[Problem]:
    """Problems of the interpreter of `sglang.python` for its tasks.

    Args:
        serves: whether it runs SGLang.
        routes: whether it runs sglang-router.
        on_cpu: whether SGLang runs on a CPU, which needs rlscale's platform plugin.
    """
    python = find_python(given)

    def problem(rule: str, value: str, fix: str = INSTALL) -> list[Problem]:
        return [Problem(path="sglang.python", rule=rule, value=value, fix=fix)]

    try:
        installed = installed_packages(python)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return problem("name a Python interpreter that runs", f"{python} ({_first_line(error)})")
    if serves and installed.sglang is None:
        return problem("name an interpreter that has SGLang", f"{python}, which does not")
    if serves and version_numbers(installed.sglang or "") < LOWEST:
        lowest = ".".join(map(str, LOWEST))
        return problem(f"name an interpreter with SGLang {lowest} or newer", f"{python} with {installed.sglang}")
    if serves and on_cpu and PLATFORM not in installed.plugins:
        return problem("have rlscale's platform plugin, to serve on a CPU", f"{python} without it")
    if routes and installed.router is None:
        fix = "run bin/install-sglang-cpu, install sglang-router there, or set router.enabled=false"
        return problem("have sglang-router, which balances the load of several engines", f"{python} without it", fix)
    return []


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.5.23.post1` -> (0, 5, 23)."""
    # Stop at suffixes such as post1, rc1 or a local version.
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
