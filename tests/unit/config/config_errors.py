"""Config errors of a command line, for tests."""

from collections.abc import Sequence
from pathlib import Path

from rlscale.config import load_config
from rlscale.errors import ConfigError


def config_errors(*words: str, config_dir: Path | None = None) -> list[str]:
    """The text of every problem; empty when the words load."""
    try:
        load_config(words, config_dir=config_dir)
    except ConfigError as error:
        assert all(problem.fix for problem in error.problems), error  # each says what to do
        return [str(problem) for problem in error.problems]
    return []


def only_error(words: Sequence[str], config_dir: Path | None = None) -> str:
    found = config_errors(*words, config_dir=config_dir)
    assert len(found) == 1, found
    return found[0]
