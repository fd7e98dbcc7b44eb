"""The interpreter of SGLang, which may differ from this one, and the packages installed in it."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from rlscale.errors import Problem

LOWEST = (0, 5, 21)
"""The first version whose weight updates are enclosed by begin and end calls."""

PLATFORM = "rlscale_cpu"
"""Name under which our platform plugin is installed."""

INSTALL = "run bin/install-sglang-cpu, or set sglang.python to an interpreter that has it"
TIMEOUT_S = 60

TRANSFER_MODULES: Mapping[str, str] = MappingProxyType(
    {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl", "mori": "mori"}
)
"""Values of `disaggregation_transfer_backend` -> the module that each imports; the first one is the default."""

# src/rlscale/config/passthrough/sglang_python.py: four levels up is the repository.
_CHECKOUT = Path(__file__).resolve().parents[4]
_PRINT_PACKAGES = """
import json, sys
from importlib import metadata, util
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
plugins = [e.name for e in metadata.entry_points(group="sglang.srt.platforms")]
modules = [name for name in sys.argv[1:] if util.find_spec(name)]
versions = {"sglang": version("sglang"), "router": version("sglang-router")}
print(json.dumps({**versions, "plugins": plugins, "modules": modules}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledPackages:
    """Versions of packages in an interpreter. None: not installed."""

    sglang: str | None
    router: str | None
    plugins: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()  # those of `TRANSFER_MODULES`


def find_python(given: str | None) -> Path:
    """The interpreter of `sglang.python`, which may not exist.

    None: this interpreter if it has SGLang, else `.venv-sglang` of the repository if it exists.
    """
    if given is not None:
        return Path(os.path.expanduser(given)).absolute()
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
        [str(python), "-c", _PRINT_PACKAGES, *dict.fromkeys(TRANSFER_MODULES.values())],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        env=foreign_environment(os.environ),
    )
    answer = json.loads(done.stdout)
    return InstalledPackages(
        sglang=answer["sglang"],
        router=answer["router"],
        plugins=tuple(answer["plugins"]),
        modules=tuple(answer["modules"]),
    )


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


def check_transfer(given: str | None, backends: Collection[str | None]) -> list[Problem]:
    """Problems of the packages that send the KV cache from prefill to decode servers.

    Args:
        given: `sglang.python`, which has SGLang.
        backends: values of `sglang.disaggregation_transfer_backend`; None: the default.
    """
    python = find_python(given)
    installed = installed_packages(python).modules
    default = next(iter(TRANSFER_MODULES))
    needed = {name: TRANSFER_MODULES.get(name) for name in (each or default for each in backends)}
    return [
        Problem(
            path="sglang.disaggregation_transfer_backend",
            rule=f"have its package {module} next to SGLang",
            value=f"{name}, and {python} without it",
            fix=f"install the package there ({_PACKAGES[module]}), or choose another backend",
        )
        for name, module in needed.items()
        if module is not None and module not in installed
    ]


_PACKAGES = {"mooncake": "mooncake-transfer-engine", "nixl": "nixl", "mori": "mori"}


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
