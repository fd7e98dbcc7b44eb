"""Keys of `buffer` and `network`, and related keys, that have no effect in a run."""

import pytest

from rlscale.config.rules import warn_ignored
from tests.unit.config.rules.valid_config import Values, config_with

READS = {"buffer.url": "http://10.0.0.1:8889"}
EXTERNAL = {"rollout.engine": "external", "rollout.external_engine_addrs": ["engine:30000"]}


@pytest.mark.parametrize(
    ("values", "path", "why", "other"),
    [
        ({}, "buffer.task_type", "buffer.url is not set", READS),
        ({**READS, "algo.loss_type": "sft_loss"}, "buffer.url", "the run trains on its data files", READS),
        (READS, "sampling.max_retries", "the processes that submit trajectories to buffer.url generate them", {}),
        (READS, "reward.type", "the trajectories of buffer.url have their rewards", {**READS, "eval.interval": 1}),
        ({}, "network.http_proxy", "the run sends no request to servers that it did not start", EXTERNAL),
        ({}, "network.http_proxy", "the run sends no request to servers that it did not start", READS),
        (READS, "network.use_distributed_post", "the run sends no generation requests", {}),
    ],
)
def test_a_key_without_effect_is_reported(values: Values, path: str, why: str, other: Values) -> None:
    assert warn_ignored(config_with(values), [path]) == [f"{path} is ignored: {why}"]
    assert warn_ignored(config_with(other), [path]) == []


@pytest.mark.parametrize("path", ["sampling.min_group_size", "sampling.max_failed_share", "reward.post_process_path"])
def test_keys_that_apply_to_groups_of_the_service_are_not_reported(path: str) -> None:
    assert warn_ignored(config_with(READS), [path]) == []
