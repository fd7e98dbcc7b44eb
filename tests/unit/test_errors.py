"""Exceptions that cross processes."""

import pickle

from rlscale.errors import ConfigError, Problem


def test_a_config_error_keeps_its_problems_between_processes() -> None:
    problems = (Problem(path="a.b", rule="be 1", value="2"), Problem(path="a.c", rule="be 3", value="4", fix="remove"))
    error = pickle.loads(pickle.dumps(ConfigError(problems, after_start=True)))
    assert (error.problems, error.after_start) == (problems, True)
    assert str(error) == "a.b must be 1, got 2\na.c must be 3, got 4; remove"
