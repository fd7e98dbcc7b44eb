"""The loop plans micro-batches by the tokens of trees where the trainer computes them, and only there."""

import pytest

from rlscale.config import BatchConfig, ClusterConfig, Device, RunConfig, TrainBackendName, TrainConfig
from rlscale.control.loop_config import LoopConfig


@pytest.mark.parametrize(
    ("backend", "share_prompts", "expected"),
    [
        (TrainBackendName.fsdp, True, True),
        (TrainBackendName.fsdp, False, False),
        (TrainBackendName.megatron, True, False),  # computes every sample separately: the key is reported as ignored
    ],
)
def test_prefixes_are_planned_as_the_trainer_computes_them(
    backend: TrainBackendName, share_prompts: bool, expected: bool
) -> None:
    run = RunConfig(
        batch=BatchConfig(rollout_batch_size=1),
        train=TrainConfig(backend=backend, share_prompts=share_prompts),
        cluster=ClusterConfig(device=Device.cpu),
    )
    assert LoopConfig(run=run, num_rollouts=1).shares_prefixes is expected
