"""The plugin with which the nightly tests continue after an interruption, in a separate checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_numbers(number):
    assert number < 3 or "REPAIRED" in os.environ

@pytest.fixture
def broken_end():
    yield
    assert "REPAIRED" in os.environ

def test_end(broken_end):
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "continued.py").write_text((ROOT / "tests" / "continued.py").read_text())
    (tmp_path / "tests" / "test_few.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / ".gitignore").write_text(".pytest_cache\n__pycache__\n")
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def _git(folder: Path, *args: str) -> None:
    names = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", "-C", str(folder), *names, *args], check=True)


def _commit(folder: Path) -> None:
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "--allow-empty", "-m", "change")


def _outcome(folder: Path, *args: str, **env: str) -> str:
    """The last line of a session."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.continued", "-p", "no:cacheprovider", *args]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-1].strip("= ").partition(" in ")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["alone", "workers"])
def test_what_passed_does_not_run_again_until_something_changes(checkout: Path, args: tuple[str, ...]) -> None:
    # A test whose end fails has not passed.
    assert _outcome(checkout, *args) == "1 failed, 4 passed, 1 error"
    # Workers of pytest-xdist do not report what they deselect.
    assert _outcome(checkout, *args, REPAIRED="1") == ("2 passed" if args else "2 passed, 3 deselected")
    assert _outcome(checkout, *args) == ("no tests ran" if args else "5 deselected")
    _commit(checkout)
    assert _outcome(checkout, *args, REPAIRED="1") == "5 passed"
    (checkout / "tests" / "test_few.py").write_text(TESTS.replace("< 3", "< 2"))
    assert _outcome(checkout, *args) == "2 failed, 3 passed, 1 error"


def test_without_git_every_session_is_complete(tmp_path: Path, checkout: Path) -> None:
    (checkout / ".git").rename(tmp_path / "elsewhere")
    for _ in range(2):
        assert _outcome(checkout, GIT_CEILING_DIRECTORIES=str(tmp_path.parent)) == "1 failed, 4 passed, 1 error"
