"""Results of user functions are checked before use: type, shape, device, gradient and finite numbers."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.config import AlgoConfig
from rlscale.training.loss.rollout_advantages import RolloutInputs, compute_rollout_advantages
from rlscale.training.loss.token_loss import TokenInputs, compute_custom_weights, compute_token_losses
from rlscale.training.loss.user_postprocess import postprocess_columns
from rlscale.types import StepSamples, TrainBatch
from tests.contract import wrong_hooks

HERE = wrong_hooks.__name__
NAN = float("nan")
LAYOUT = TokenLayout.from_lengths(torch.tensor([True, False, True, True]), lengths_S=torch.tensor([3, 1]))


def vector(*values: float) -> Tensor:
    return torch.tensor(values)


def losses(logprobs: Tensor, layout: TokenLayout = LAYOUT, **algo: Any) -> tuple[Tensor, dict[str, float]]:
    inputs = TokenInputs(
        old_logprobs=vector(-1, NAN, -1, -2), rollout_logprobs=vector(-1, NAN, -3, -1), advantages=vector(1, NAN, 1, -2)
    )
    found, sums = compute_token_losses(
        AlgoConfig(**algo), logprobs=logprobs, entropy=None, inputs=inputs, layout=layout
    )
    return found, {name: float(total / count) for name, (total, count) in sums.items()}


def run_loss(name: str, layout: TokenLayout = LAYOUT) -> tuple[Tensor, dict[str, float]]:
    algo: dict[str, Any] = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}:{name}"}
    return losses(vector(-0.5, NAN, -1, -3).requires_grad_(), layout, **algo)


def run_weights(name: str) -> tuple[Tensor, dict[str, float]]:
    logprobs = vector(-0.5, NAN, -1, -3).requires_grad_()
    return losses(logprobs, use_tis=True, custom_tis_function_path=f"{HERE}:{name}")


def run_advantages(name: str) -> Tensor:
    rollout = RolloutInputs(
        rewards_S=vector(0.5, 1.0),
        group_ids_S=torch.tensor([4, 4]),
        response_lens_S=torch.tensor([3, 1]),
        max_response_len=4,
        layout=LAYOUT,
        rollout_logprobs_T=vector(0, 0, 0, 0),
    )
    return compute_rollout_advantages(AlgoConfig(custom_advantage_function_path=f"{HERE}:{name}"), rollout)


def run_reducer(name: str) -> Tensor:
    step = StepSamples(
        num_trainable=torch.tensor([2, 1]),
        trajectory_ids=torch.tensor([0, 1]),
        group_ids=torch.tensor([7, 7]),
        rewards=vector(1, 0),
        max_response_len=8,
    )
    return compute_custom_weights(f"{HERE}:{name}", step)


def apply_user_postprocess(name: str) -> Any:
    batch = TrainBatch(
        tokens=np.zeros(4, dtype=np.int32),
        loss_mask=np.array([0, 1, 0, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(4, dtype=np.float32),
        weight_versions=np.zeros(4, dtype=np.int32),
        offsets=np.array([0, 2, 4]),
        prompt_lens=np.ones(2, dtype=np.int32),
        rewards=np.array([1, 0], dtype=np.float32),
        group_ids=np.array([3, 3]),
        trajectory_ids=np.arange(2),
        version=0,
    )
    columns = {
        "old_logprobs": None,
        "rollout_logprobs": torch.zeros(4),
        "ref_logprobs": None,
        "advantages": torch.ones(4),
    }
    return postprocess_columns(f"{HERE}:{name}", columns, batch=batch, rows=np.array([1, 3]))


LOSS, WEIGHTS, COLUMNS = (f"the {what} of {HERE}:" for what in ("loss", "weights", "columns"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "alone",
            f"{HERE}:alone must return (loss, metrics), got a tensor of shape (4,); without a metric return {{}}",
        ),
        ("of_three", "must return (loss, metrics), got a tuple of 3"),
        ("listed", f"{LOSS}listed must be a tensor, got list"),
        ("complex_numbers", f"{LOSS}complex_numbers must have a real dtype, got torch.complex64"),
        ("elsewhere", f"{LOSS}elsewhere must be on cpu, got meta"),
        ("detached", f"{LOSS}detached must depend on logprobs, got one without gradient"),
        (
            "infinite",
            f"{LOSS}infinite must be finite at trainable tokens, got -inf in sample 1, the first of 1 among 3",
        ),
        ("without_metrics", "the metrics of tests.contract.wrong_hooks:without_metrics must be a mapping"),
        ("unnamed", "must have a string as its name, got int"),
        (
            "plain_number",
            "the metric 'mean' of tests.contract.wrong_hooks:plain_number must be (sum, count), got float",
        ),
        ("by_token", "must hold single numbers, got a tensor of shape (4,); sum over the tokens first"),
        ("unmasked_sum", "must be finite, got nan; exclude tokens where tokens.mask is false"),
        ("named_loss", "the metric 'loss' of tests.contract.wrong_hooks:named_loss must have another name"),
    ],
)
def test_a_loss(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_loss(name)


def test_plain_numbers_are_metrics_too() -> None:
    found, metrics = run_loss("numbers")
    assert found.tolist() == [0.5, 0.0, 1.0, 3.0] and metrics == {"three": 3.0, "two": 2.0}


def test_a_constant_loss_is_valid_without_trainable_tokens() -> None:
    # A rank without a trainable token still takes part in the backward pass.
    nothing = TokenLayout.from_lengths(torch.zeros(4, dtype=torch.bool), lengths_S=torch.tensor([3, 1]))
    found, _ = run_loss("nothing_to_learn", nothing)
    assert found.tolist() == [0.0] * 4 and found.requires_grad
    with pytest.raises(ValueError, match="must depend on logprobs"):
        run_loss("nothing_to_learn")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights_alone", "must return (weights, metrics), got a tensor of shape (4,)"),
        ("weights_of_nan", f"{WEIGHTS}weights_of_nan must be finite at trainable tokens, got nan in sample 0"),
        (
            "weights_as_ratio",
            "the metric 'ratio_mean' of tests.contract.wrong_hooks:weights_as_ratio must have another",
        ),
    ],
)
def test_weights(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_weights(name)


def test_weights_may_be_booleans() -> None:
    # Without a weight the loss of the last token would be -A ratio = 2 exp(-3 + 2).
    found, _ = run_weights("weights_kept")
    assert found[3] == 0.0 and (found[[0, 2]] != 0).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("advantages_with_metrics", "advantages_with_metrics must be a tensor, got tuple"),
        ("advantages_of_nan", "must be finite at trainable tokens, got nan in sample 1, the first of 1 among 3"),
    ],
)
def test_advantages(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_advantages(name)


def test_a_reducer() -> None:
    with pytest.raises(ValueError, match=re.escape(f"{WEIGHTS}listed_weights must be a tensor, got list")):
        run_reducer("listed_weights")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("columns_alone", "must return (columns, metrics), got TokenColumns"),
        ("columns_as_mapping", f"{COLUMNS}columns_as_mapping must be TokenColumns, got dict"),
        ("columns_of_nan", f"advantages of {COLUMNS}columns_of_nan must be finite at trainable tokens, got nan"),
        ("columns_named_kl", "the metric 'kl' of tests.contract.wrong_hooks:columns_named_kl must have another name"),
    ],
)
def test_a_postprocess(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_user_postprocess(name)
