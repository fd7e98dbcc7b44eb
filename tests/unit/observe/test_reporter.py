"""Limit of the logprob difference between trainer and engine."""

import math

from rlscale.config import PauseMode, RolloutConfig, UpdateMode, mixes_caches
from rlscale.observe.reporter import diff_limit


def test_the_dtype_sets_the_default_limit() -> None:
    assert diff_limit(None, "float32") < diff_limit(None, "bfloat16")
    assert diff_limit(0.3, "float32") == 0.3


def test_caches_of_several_weight_versions_have_no_default_limit() -> None:
    assert diff_limit(None, "float32", mixes_caches=True) == math.inf
    assert diff_limit(0.3, "float32", mixes_caches=True) == 0.3


def test_caches_mix_if_requests_stay_in_place_during_an_update() -> None:
    config = RolloutConfig(max_staleness=1, update_mode=UpdateMode.in_flight, pause_mode=PauseMode.in_place)
    assert mixes_caches(config)
    for name, value in (
        ("max_staleness", 0),
        ("update_mode", UpdateMode.boundary),
        ("pause_mode", PauseMode.retract),
    ):
        before = getattr(config, name)
        setattr(config, name, value)
        assert not mixes_caches(config), name
        setattr(config, name, before)
