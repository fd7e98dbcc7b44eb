"""Fixtures shared with the unit tests of rewards."""

from tests.unit.rewards.conftest import make_sample

__all__ = ["make_sample"]
