"""Garbage collection during a run."""

import gc

import pytest

from rlscale.control.gc_tuning import FULL_EVERY, rare_full_collections


def test_full_collections_are_rare_inside_and_as_before_outside() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_full_collections():
        assert gc.get_threshold() == (*before[:2], FULL_EVERY)
        raise KeyError
    assert gc.get_threshold() == before
