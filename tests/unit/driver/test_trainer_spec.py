"""Spec of the trainer ranks."""

import pytest

from rlscale import load_config
from rlscale.driver.trainer_spec import weight_owners


@pytest.mark.parametrize(
    ("channel", "device", "owners"),
    [
        ("process_group", "cpu", "owners"),
        ("disk", "cpu", "owners"),
        ("delta", "cpu", "owners"),
        ("shared_memory", "cpu", "first"),
        ("shared_memory", "cuda", "every"),
    ],
)
def test_each_channel_has_the_weights_on_the_ranks_that_send(channel: str, device: str, owners: str) -> None:
    keys = (f"train.weight_channel={channel}", f"cluster.device={device}", f"cluster.colocate={device == 'cuda'}")
    config = load_config(["experiment=quickstart", *keys])
    assert weight_owners(config) == owners
