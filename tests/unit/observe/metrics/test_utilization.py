"""MFU from literal batches: operations by hand, divided by seconds, ranks and rate."""

import numpy as np
import pytest

from rlscale.architectures.architecture import ForwardCost
from rlscale.observe.metrics.utilization import forward_flops, utilization
from rlscale.types import TrainBatch, TrainResult

COST = ForwardCost(per_token=100, per_pair=10, per_logit_row=1000)


def batch() -> TrainBatch:
    """Samples of 4 and 2 tokens, with 3 and 1 trainable ones."""
    return TrainBatch(
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 1, 1, 1, 0, 1], np.uint8),
        rollout_logprobs=np.zeros(6, np.float32),
        weight_versions=np.zeros(6, np.int32),
        offsets=np.array([0, 4, 6]),
        prompt_lens=np.array([1, 1], np.int32),
        rewards=np.zeros(2, np.float32),
        group_ids=np.array([0, 0]),
        trajectory_ids=np.array([0, 1]),
        version=0,
    )


def test_a_token_attends_to_half_of_its_sample_on_average() -> None:
    assert forward_flops(batch(), COST) == 6 * 100 + 10 * (16 + 4) / 2 + 4 * 1000


def test_layers_with_a_sliding_window_have_fewer_pairs() -> None:
    cost = ForwardCost(per_token=100, per_pair=10, per_logit_row=1000, window=3, window_share=0.5)
    assert forward_flops(batch(), cost) == 6 * 100 + 10 * (16 - 0.5 * 1 + 4) / 2 + 4 * 1000


def test_the_backward_pass_costs_two_forward_passes() -> None:
    result = TrainResult(steps=[], metrics={}, seconds={"optimize": 2.0}, num_epochs=2, device_flops=1e4)
    flops = 3 * 4700.0 * 2 / 2.0 / 4
    assert utilization(batch(), result, cost=COST, num_ranks=4) == pytest.approx(
        {
            "throughput/train_tflops": flops / 1e12,
            "throughput/device_tflops": 1e-8,
            "throughput/mfu": flops / 1e4,
        }
    )


@pytest.mark.parametrize(("cost", "seconds"), [(None, 2.0), (COST, 0.0)], ids=["unknown model", "only the critic"])
def test_it_is_omitted_where_it_is_not_known(cost: ForwardCost | None, seconds: float) -> None:
    result = TrainResult(steps=[], metrics={}, seconds={"optimize": seconds}, device_flops=1e4)
    assert utilization(batch(), result, cost=cost, num_ranks=1) == {}


def test_without_a_rate_there_is_no_share() -> None:
    result = TrainResult(steps=[], metrics={}, seconds={"optimize": 1.0})
    assert utilization(batch(), result, cost=COST, num_ranks=1).keys() == {"throughput/train_tflops"}
