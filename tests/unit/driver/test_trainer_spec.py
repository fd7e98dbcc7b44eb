"""Spec of the trainer ranks."""

import pytest

from rlscale import load_config
from rlscale.driver.trainer_spec import _used_fields, weight_owners


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


def test_sizes_that_a_built_model_does_not_have_do_not_reach_the_trainer() -> None:
    """They are reported as ignored; Megatron-core would find that they contradict the written config.json."""
    config = load_config(["experiment=quickstart", "model=tiny_qwen3_moe", "model.intermediate_size=64"])
    assert config.model.intermediate_size == 64
    used = _used_fields(config.model)
    assert used.intermediate_size is None and used.moe_intermediate_size == config.model.moe_intermediate_size
    plain = load_config(["experiment=quickstart", "model.intermediate_size=64"]).model
    assert _used_fields(plain) == plain
