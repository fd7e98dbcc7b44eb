"""The checks of the project. `bin/test` makes the environment and runs them in it; so does `nox` from inside it."""

import os
import sys
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "none"  # sessions share the environment nox runs in: there is one torch to install
nox.options.sessions = ["lint", "types", "unit", "integration"]
nox.options.error_on_missing_interpreters = False

CODE = ("src", "tests", "plugins", "bin", "scripts", "benchmarks", "noxfile.py")

PLAIN = ("tests/unit", "tests/golden", "tests/property")
PROCESSES = (
    "tests/ranks",
    "tests/contract",
    "tests/integration",
    "tests/cluster",
    "tests/packaging",
    "tests/browser",
    "tests/test_architecture.py",
    "tests/test_architecture_page.py",
    "tests/test_docs.py",
    "tests/test_docs_commands.py",
    "tests/test_words.py",
)
NO_TESTS = 5  # pytest's exit status where nothing was selected, e.g. while no test is marked nightly

# A worker more than cores, which works while others wait for a process or a deadline. See tests/conftest.py for which
# tests stay together, and which come first.
SIDE_BY_SIDE = ("-n", str(min((os.cpu_count() or 1) + 1, 4)), "--dist", "loadfile")


def _python(session: nox.Session, *args: str, **options: Any) -> None:
    session.run(sys.executable, "-m", *args, external=True, **options)


def _pytest(session: nox.Session, folders: tuple[str, ...], markers: str, *args: str) -> None:
    """Runs the tests of `folders` that have `markers`; paths after `--` replace the folders."""
    env = {
        # One thread per process: tests start several processes, and two-thread OpenMP suffers badly from contention.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Python reads the empty string as unset. Without byte code every process compiles the package again.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    chosen = any(Path(word.split("::")[0]).exists() for word in session.posargs if not word.startswith("-"))
    command = ("pytest", "-q", "-m", markers, *args, *(() if chosen else folders), *session.posargs)
    _python(session, *command, env=env, success_codes=[0, NO_TESTS])


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting; codespell."""
    _python(session, "ruff", "check", *CODE)
    _python(session, "ruff", "format", "--check", *CODE)
    _python(session, "codespell_lib", *CODE, "conf", "docs", *sorted(map(str, Path().glob("*.md"))))


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    _python(session, "mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """Unit, golden and property tests. They start no process."""
    _pytest(session, PLAIN, "not (slow or nightly or gpu)", "--durations=10", *SIDE_BY_SIDE)


@nox.session
def integration(session: nox.Session) -> None:
    """Tests that start processes, but for the slow ones."""
    _pytest(session, PROCESSES, "not (slow or nightly or gpu)", "--durations=15", *SIDE_BY_SIDE)


@nox.session
def slow(session: nox.Session) -> None:
    """Slow tests, and tests that need a second environment: SGLang, the wheel, the quickstart, long runs."""
    _pytest(session, (*PLAIN, *PROCESSES), "slow and not (nightly or gpu)", "--durations=15", *SIDE_BY_SIDE)


@nox.session
def all_tests(session: nox.Session) -> None:
    """Unit, integration and slow in one: collected once, and no worker waits for another. Part of `bin/test --all`."""
    _pytest(session, (*PLAIN, *PROCESSES), "not (nightly or gpu)", "--durations=30", *SIDE_BY_SIDE)


@nox.session
def nightly(session: nox.Session) -> None:
    """Tests that take too long for CI. Continues where a session of the same commit was interrupted or failed."""
    _pytest(session, ("tests",), "nightly and not gpu", "-p", "tests.continued", "--durations=15", *SIDE_BY_SIDE)


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests that need a CUDA device."""
    _pytest(session, ("tests/gpu",), "gpu", "--timeout=1800")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation builds without a warning."""
    # The theme prints an advertisement for its successor otherwise.
    # Not with --quiet: it hides warnings from --strict, too.
    _python(session, "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
