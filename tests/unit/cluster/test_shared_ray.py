"""GPUs and adapters that the jobs of a sweep need together."""

import pytest

from rlscale.cluster.shared_ray import Needs, count_needs
from tests.unit.config.rules.valid_config import Values, config_with

SHARED: Values = {
    "rollout.engine": "embedded",
    "train.lora.rank": 8,
    "train.lora.sync": "adapter",
    "train.lora.shared_base": True,
    "rollout.max_staleness": 1,
    "cluster.colocate": False,
    "cluster.actor_num_gpus_per_node": 2,
    "cluster.rollout_num_gpus": 3,
}


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([{"train.lora.shared_base": False}] * 2, Needs(per_job=5, shared=0, num_adapters=0)),
        ([{}, {"optim.lr": 1e-3}], Needs(per_job=2, shared=3, num_adapters=2)),
        ([{}, {"rollout.num_slots": 32}], Needs(per_job=2, shared=6, num_adapters=2)),
        ([{}, {"train.lora.shared_base": False}], Needs(per_job=5, shared=3, num_adapters=2)),
        ([{"cluster.actor_num_gpus_per_node": 4}, {}], Needs(per_job=4, shared=3, num_adapters=2)),
    ],
)
def test_engines_that_jobs_share_count_once(jobs: list[Values], expected: Needs) -> None:
    assert count_needs([config_with({**SHARED, **job}) for job in jobs]) == expected
