"""How every command shows what is wrong with a configuration."""

from __future__ import annotations

from rlscale.errors import ConfigError


def mistakes_text(command: str, error: ConfigError) -> str:
    """A heading and one line for each mistake."""
    number = len(error.problems)
    heading = "1 mistake" if number == 1 else f"{number} mistakes"
    lines = "".join(f"  {problem}\n" for problem in error.problems)
    return f"{command}: {heading}, nothing was started\n{lines}"
