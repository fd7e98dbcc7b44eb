"""Effects of the user's functions in the trainer, whatever the ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec
from tests.unit.training.user_functions import ALL, HERE

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
TWO_STEPS = [[[[0, 1, 2], [3]]], [[[4, 5], [6, 7]]]]


def trained(
    model_path: str, batch: TrainBatch = BATCH, *, cuts: Any = TWO_STEPS, **changes: Any
) -> tuple[list[dict[str, float]], dict[str, float], list[Tensor]]:
    """Metrics of the steps and of the rollout, and the weights."""
    backend = FsdpBackend(spec(model_path, adam_eps=1e-4, **changes), rank=0, world_size=1)
    result = backend.train(batch, [plan(batch, cut) for cut in cuts])
    return result.steps, result.metrics, [weight.clone() for _, weight in backend.weights()]


def test_an_equal_reducer_of_the_user_has_equal_results(model_path: str) -> None:
    mine, _, my_weights = trained(model_path, algo={"custom_reducer_function_path": f"{HERE}:by_token"})
    per_token, _, weights = trained(model_path, algo={"calculate_per_token_loss": True})
    default, _, _ = trained(model_path)
    assert mine[1] == pytest.approx(per_token[1], rel=1e-5, abs=1e-6)
    assert abs(mine[0]["grad_norm"] / default[0]["grad_norm"] - 1) > 0.01
    for a, b in zip(my_weights, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_postprocess_without_changes_is_bitwise_equal(model_path: str) -> None:
    path = f"{HERE}:nothing"
    plain, looked = (trained(model_path, **changes) for changes in ({}, {"rollout_data_postprocess_path": path}))
    assert looked[:2] == plain[:2]
    assert all(torch.equal(a, b) for a, b in zip(looked[2], plain[2], strict=True))


def test_a_postprocess_can_change_the_advantages(model_path: str) -> None:
    changes = {"rollout_data_postprocess_path": f"{HERE}:bounded", "custom": {"bound": 0.0}}
    steps, metrics, _ = trained(model_path, **changes)
    assert [step["grad_norm"] for step in steps] == [0.0, 0.0]  # without advantages
    assert metrics["rollout/bounded"] == 1.0


def test_changed_logprobs_of_the_engine_leave_the_metrics_of_the_trainer(model_path: str) -> None:
    algo = {"use_rollout_logprobs": True}
    _, expected, _ = trained(model_path, algo=algo)
    _, metrics, _ = trained(model_path, algo=algo, rollout_data_postprocess_path=f"{HERE}:moved")
    for name in ("logprob_diff/mean", "rollout/log_probs"):
        assert metrics[name] == expected[name]


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.slow
def test_micro_batches_do_not_change_results_of_user_functions(model_path: str, loss: bool) -> None:
    algo = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}:loss"} if loss else ALL
    custom = {"scale": 0.5, "bound": 1.0 if loss else 0.1}
    changes = {"custom": custom, "algo": algo, "rollout_data_postprocess_path": f"{HERE}:bounded"}
    whole = trained(model_path, cuts=[[[[*range(8)]]]], **changes)
    cut = trained(model_path, cuts=[[[[7, 3], [], [1], [0, 2, 6, 4, 5]]]], **changes)
    assert cut[0][0] == pytest.approx(whole[0][0], rel=1e-4, abs=1e-6)
    assert 0 < cut[1]["rollout/bounded"] < 1 and cut[1] == pytest.approx(whole[1], rel=1e-5, abs=1e-6)
    for a, b in zip(cut[2], whole[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
