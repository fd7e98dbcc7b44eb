"""Fixtures shared with the unit tests of benchmarks."""

from tests.unit.benchmarks.conftest import scripts_can_be_imported

__all__ = ["scripts_can_be_imported"]
