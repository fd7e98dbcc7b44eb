"""Conditions of engines that join later."""

import pytest

from rlscale import load_config
from rlscale.errors import ConfigError
from rlscale.plan.placement import build_layout, further_engines

ELASTIC = ("experiment=quickstart", "fault_tolerance.enabled=true", "cluster.rollout_max_num_gpus=3")


def test_the_maximum_counts_all_engines() -> None:
    config = load_config(list(ELASTIC))
    one, number = further_engines(config, build_layout(config))
    assert number == 2
    assert (one.num_trainers, one.num_engines, one.bundle_sizes) == (0, 1, (1,))
    plain = load_config(["experiment=quickstart"])
    assert further_engines(plain, build_layout(plain))[1] == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fault_tolerance.enabled=false", "be null without fault_tolerance.enabled"),
        ("cluster.rollout_num_gpus=4", "be at least cluster.rollout_num_gpus=4"),
        ("router.enabled=true", "be null with a router"),
        ("train.weight_channel=shared_memory", "be null with train.weight_channel=shared_memory"),
        ("cluster.colocate=true", "be null with cluster.colocate"),
    ],
)
def test_conditions_are_reported(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.rollout_max_num_gpus must " + message):
        load_config([*ELASTIC, override])
