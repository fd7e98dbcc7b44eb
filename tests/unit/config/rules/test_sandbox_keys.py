"""Keys of `sandbox` that have no effect in a run."""

import pytest

from rlscale.config.rules import warn_ignored
from tests.unit.config.rules.valid_config import Values, config_with

USED = {"sandbox.kind": "subprocess"}
FUSION = {"sandbox.kind": "fusion", "sandbox.url": "http://10.0.0.1:8080"}


@pytest.mark.parametrize(
    ("values", "path", "why", "other"),
    [
        ({}, "sandbox.memory_mb", "sandbox.kind is not set", USED),
        (USED, "sandbox.image", "sandbox.kind is not docker", {"sandbox.kind": "docker"}),
        (USED, "sandbox.url", "sandbox.kind=subprocess uses processes of this machine", {"sandbox.kind": "docker"}),
        ({"sandbox.kind": "docker"}, "sandbox.read_only_folders", "sandbox.kind is not subprocess", USED),
        (FUSION, "sandbox.memory_mb", "the service of sandbox.kind=fusion sets these limits", USED),
        ({**USED, "buffer.url": "http://10.0.0.1:1"}, "sandbox.kind", "the run generates no trajectories", USED),
        ({**USED, "algo.loss_type": "sft_loss"}, "sandbox.kind", "the run generates no trajectories", USED),
    ],
)
def test_a_key_without_effect_is_reported(values: Values, path: str, why: str, other: Values) -> None:
    assert warn_ignored(config_with(values), [path]) == [f"{path} is ignored: {why}"]
    assert warn_ignored(config_with(other), [path]) == []
