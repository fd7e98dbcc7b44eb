"""Paths of a command line that no file system accepts, reported in one line."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

from rlscale.errors import Problem

WRONG_INPUT = 2
SHOWN = 60

Arguments = ParamSpec("Arguments")


def reports_long_paths(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorates the main function of a command: prints the error of a path that is too long, and returns 2.

    Every question about such a path is an error of the system, not "no"; a command asks many, of many arguments.
    """
    command = f"rlscale-{main.__module__.rpartition('.')[2].replace('_', '-')}"

    @functools.wraps(main)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except OSError as error:
            if (problem := long_path_problem(error)) is None:
                raise
            sys.stderr.write(f"{command}: {problem}\n")
            return WRONG_INPUT

    return wrapped


def long_path_problem(error: OSError) -> Problem | None:
    """The problem of a path that is too long; None for another error."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    path = os.fsdecode(error.filename or "")
    shown = path if len(path) <= SHOWN else f"{path[:SHOWN]}... ({len(path)} characters)"
    return Problem(path="a path", rule="have names of at most 255 bytes", value=shown, fix="use a shorter one")
