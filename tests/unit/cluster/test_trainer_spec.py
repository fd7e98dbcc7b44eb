"""What trainer ranks are told."""

import pytest

from rlscale import load_config
from rlscale.driver.trainer_spec import weight_owners


@pytest.mark.parametrize(
    ("channel", "device", "who"),
    [
        ("process_group", "cpu", "owners"),
        ("disk", "cpu", "owners"),
        ("delta", "cpu", "first"),
        ("shared_memory", "cpu", "first"),
        ("shared_memory", "cuda", "every"),
    ],
)
def test_each_channel_gets_the_weights_where_it_sends_them_from(channel: str, device: str, who: str) -> None:
    config = load_config(["experiment=quickstart", f"train.weight_channel={channel}", f"cluster.device={device}"])
    assert weight_owners(config) == who
