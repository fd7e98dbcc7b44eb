"""The checks of the project. `bin/test` makes the environment and runs them in it; so does `nox` from inside it."""

import os
import sys
from typing import Any

import nox

nox.options.default_venv_backend = "none"  # sessions share the environment nox runs in: there is one torch to install
nox.options.sessions = ["lint", "types", "unit", "integration"]
nox.options.error_on_missing_interpreters = False

CODE = ("src", "tests", "plugins", "bin", "scripts", "benchmarks", "noxfile.py")

# One worker a core; more would only need more memory. See tests/conftest.py for which tests stay together, and which
# come first.
SIDE_BY_SIDE = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile")


def _python(session: nox.Session, *args: str, **options: Any) -> None:
    session.run(sys.executable, "-m", *args, external=True, **options)


def _pytest(session: nox.Session, markers: str, *args: str) -> None:
    # One thread per process: tests start several processes, and two-thread OpenMP suffers badly from contention.
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    words = ("pytest", "-q", "-m", markers, *args, *session.posargs)
    _python(session, *words, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    _python(session, "ruff", "check", *CODE)
    _python(session, "ruff", "format", "--check", *CODE)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    _python(session, "mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """Everything that runs in one process: unit, golden, property, contract and architecture tests."""
    _pytest(session, "not (integration or slow or gpu)", *SIDE_BY_SIDE)


@nox.session
def integration(session: nox.Session) -> None:
    """Runs of several processes, small."""
    _pytest(session, "integration and not (slow or gpu)", "--durations=15", *SIDE_BY_SIDE)


@nox.session
def slow(session: nox.Session) -> None:
    """What is slow or needs a second environment: SGLang, the wheel, the quickstart, long runs."""
    _pytest(session, "slow and not gpu", "--durations=15", *SIDE_BY_SIDE)


@nox.session
def runs(session: nox.Session) -> None:
    """Integration and slow in one: no worker waits for the other in between. What `bin/test --all` calls."""
    _pytest(session, "(integration or slow) and not gpu", "--durations=30", *SIDE_BY_SIDE)


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device."""
    _pytest(session, "gpu", "--timeout=1800")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation builds without a warning."""
    _python(session, "mkdocs", "build", "--strict", "--quiet")
