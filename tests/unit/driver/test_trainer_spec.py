"""Spec of the trainer ranks."""

import pytest

from rlscale import load_config
from rlscale.driver.trainer_spec import weight_owners


@pytest.mark.parametrize(
    ("channel", "device", "owners"),
    [
        ("process_group", "cpu", "owners"),
        ("disk", "cpu", "owners"),
        ("delta", "cpu", "first"),
        ("shared_memory", "cpu", "first"),
        ("shared_memory", "cuda", "every"),
    ],
)
def test_each_channel_has_the_weights_on_the_ranks_that_send(channel: str, device: str, owners: str) -> None:
    config = load_config(["experiment=quickstart", f"train.weight_channel={channel}", f"cluster.device={device}"])
    assert weight_owners(config) == owners
