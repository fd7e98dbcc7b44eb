"""Config errors of a command line, for tests."""

from collections.abc import Sequence
from pathlib import Path

from rlscale.config import load_config
from rlscale.errors import ConfigError


def config_errors(*overrides: str, config_dir: Path | None = None) -> list[str]:
    """The text of every problem; empty when the config loads."""
    try:
        load_config(overrides, config_dir=config_dir)
    except ConfigError as error:
        assert all(problem.fix for problem in error.problems), error  # each has an advice
        return [str(problem) for problem in error.problems]
    return []


def only_error(overrides: Sequence[str], config_dir: Path | None = None) -> str:
    found = config_errors(*overrides, config_dir=config_dir)
    assert len(found) == 1, found
    return found[0]
