"""Exceptions that cross processes."""

import pickle

import pytest

from rlscale.errors import ConfigError, EngineError, Problem


def test_a_config_error_keeps_its_problems_between_processes() -> None:
    problems = (Problem(path="a.b", rule="be 1", value="2"), Problem(path="a.c", rule="be 3", value="4", fix="remove"))
    error = pickle.loads(pickle.dumps(ConfigError(problems, after_start=True)))
    assert (error.problems, error.after_start) == (problems, True)
    assert str(error) == "a.b must be 1, got 2\na.c must be 3, got 4; remove"


@pytest.mark.parametrize(("status", "is_refusal"), [(None, False), (400, True), (422, True), (429, False)])
def test_an_engine_error_keeps_its_status_between_processes(status: int | None, is_refusal: bool) -> None:
    error = pickle.loads(pickle.dumps(EngineError("engine 0 refused", status=status, reason="too long")))
    assert (str(error), error.status, error.reason) == ("engine 0 refused", status, "too long")
    assert error.is_refusal == is_refusal
