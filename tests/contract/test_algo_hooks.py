"""Contract of user functions for training: arguments and results. The examples of the docs keep it."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.config import AlgoConfig, BatchConfig, MegatronConfig, RunConfig, TrainBackendName, TrainConfig
from rlscale.config.user_functions import check_hooks
from rlscale.errors import ConfigError
from rlscale.training.loss.rollout_advantages import RolloutInputs, compute_rollout_advantages
from rlscale.training.loss.token_loss import (
    StepReduction,
    TokenInputs,
    compute_custom_weights,
    compute_step_denominators,
    compute_token_losses,
)
from rlscale.training.loss.user_postprocess import postprocess_columns
from rlscale.types import StepPlan, StepSamples, TrainBatch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-loss.md"
EXAMPLES = ["my_loss", "spread", "my_advantages", "my_weights", "my_reducer", "my_postprocess"]
NAN = float("nan")
LAYOUT = TokenLayout.from_lengths(torch.tensor([True, False, True, True]), lengths_S=torch.tensor([3, 1]))

OTHERS = """
from dataclasses import replace

import torch

def shifted(logprobs, tokens):
    return logprobs[1:], {}

def raw(logprobs, tokens):
    assert tokens.advantages is None and tokens.old_logprobs is None and tokens.ref_logprobs is None
    return -logprobs, {"seen": (logprobs.detach().sum(), torch.tensor(1.0))}

def of_entropy(logprobs, tokens):
    return tokens.entropy, {}

def nan_where_masked(tokens):
    return torch.where(tokens.mask, 0.5, float("nan")).requires_grad_(), {}

def short(rollout):
    return rollout.rewards

def as_the_default(step):
    totals = torch.zeros(len(step.num_trainable)).index_add(0, step.trajectory_ids, step.num_trainable.float())
    return 1 / (totals[step.trajectory_ids].clamp(min=1) * (totals > 0).sum())

def infinite(step):
    return 1.0 / torch.zeros(len(step.rewards))

def other_number(step):
    return torch.ones(1)

def in_place(rollout):
    rollout.tokens.advantages.mul_(2)
    return rollout.tokens, {}

def of_trajectories(rollout):
    return rollout.tokens, {"ids": (rollout.trajectory_ids.sum().float(), float(len(rollout.rewards)))}

def over_the_mean(rollout):
    assert len(rollout.rewards) == len(rollout.trajectory_ids) == rollout.tokens.num_samples
    return (rollout.rewards - rollout.rewards.mean() + rollout.trajectory_ids)[rollout.tokens.sample_ids]

def without_old(rollout):
    return replace(rollout.tokens, old_logprobs=None), {}

def invented(rollout):
    return replace(rollout.tokens, ref_logprobs=rollout.tokens.rollout_logprobs), {}

def unmasked(rollout):
    return replace(rollout.tokens, mask=~rollout.tokens.mask), {}

def cut_off(rollout):
    return replace(rollout.tokens, rollout_logprobs=rollout.tokens.rollout_logprobs[:-1]), {}

def scaled_loss(logprobs, tokens, custom):
    return -custom["scale"] * logprobs, {}

def scaled_advantages(rollout, custom):
    return custom["scale"] * rollout.tokens.rollout_logprobs

def scaled_weights(tokens, *, custom):
    return torch.full_like(tokens.old_logprobs, custom["scale"]), {}

def scaled_reducer(step, custom):
    return torch.full((len(step.rewards),), custom["scale"])

def from_old(rollout):
    assert rollout.tokens.ref_logprobs is None
    return rollout.tokens.old_logprobs

def two(logprobs, tokens, more): ...

number = 2

class Loss: ...
"""


def vector(*values: float) -> Tensor:
    return torch.tensor(values)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples of the page, as modules of their names, and some more."""
    texts = re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for _, name in texts] == EXAMPLES
    for text, name in [*texts, (OTHERS, "other_hooks_for_test")]:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in (*EXAMPLES, "other_hooks_for_test"):
        sys.modules.pop(name, None)


def losses(logprobs: Tensor, *, entropy: Tensor | None = None, **algo: Any) -> tuple[Tensor, dict[str, float]]:
    inputs = TokenInputs(
        old_logprobs=vector(-1, NAN, -1, -2),
        rollout_logprobs=vector(-1, NAN, -3, -1),
        ref_logprobs=vector(-1, NAN, -1, -1) if algo.get("use_kl_loss") else None,
        advantages=vector(1, NAN, 1, -2) if algo.pop("advantages", True) else None,
    )
    found, sums = compute_token_losses(
        AlgoConfig(**algo), logprobs=logprobs, entropy=entropy, inputs=inputs, layout=LAYOUT
    )
    return found, {name: float(total / count) for name, (total, count) in sums.items()}


CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": "my_loss:squared"}


def test_the_loss_of_the_docs() -> None:
    # drift 0.5, 0 and -1 with A = 1, 1 and -2: -0.5 + 0.125, 0, -2 + 0.5.
    logprobs = vector(-0.5, NAN, -1, -3).requires_grad_()
    found, metrics = losses(logprobs, **CUSTOM)
    assert found.tolist() == [-0.375, 0.0, 0.0, -1.5]
    assert metrics == {"drift": pytest.approx(-0.5 / 3)}
    found.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, 0.0, -1.0, 1.0]


def test_kl_loss_and_entropy_bonus_are_added_to_it() -> None:
    logprobs, entropy = vector(-0.5, NAN, -1, -3), vector(1, NAN, 2, 3)
    found, metrics = losses(
        logprobs, entropy=entropy, **CUSTOM, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01
    )
    kept = found[LAYOUT.mask_T]
    torch.testing.assert_close(kept, vector(-0.375 + 0.0125 - 0.01, -0.02, -1.5 + 0.2 - 0.03))
    assert metrics["kl_loss"] == pytest.approx((0.125 + 2.0) / 3) and metrics["entropy"] == 2.0


def test_without_advantages_only_rollout_logprobs_are_set() -> None:
    algo = {**CUSTOM, "custom_loss_function_path": "other_hooks_for_test:raw", "compute_advantages_and_returns": False}
    found, metrics = losses(vector(-1, 0, -2, -3), advantages=False, **algo)
    assert found.tolist() == [1.0, 0.0, 2.0, 3.0] and metrics == {"seen": -6.0}


def test_a_loss_receives_the_entropy() -> None:
    algo = {**CUSTOM, "custom_loss_function_path": "other_hooks_for_test:of_entropy"}
    assert losses(vector(0, 0, 0, 0), entropy=vector(1, NAN, 2, 3), **algo)[0].tolist() == [1.0, 0.0, 2.0, 3.0]


def test_a_loss_with_a_parameter_logits_receives_them() -> None:
    logits = torch.tensor([[0.0, 0.0], [NAN, NAN], [0.0, 1.0], [2.0, 0.0]], requires_grad=True)
    algo = AlgoConfig(**{**CUSTOM, "custom_loss_function_path": "spread:spread"})
    inputs = TokenInputs(
        old_logprobs=vector(-1, NAN, -1, -2),
        rollout_logprobs=vector(-1, NAN, -3, -1),
        advantages=vector(1, NAN, 1, -2),
        logits=logits,
    )
    found, sums = compute_token_losses(
        algo, logprobs=vector(-1, NAN, -1, -2), entropy=None, inputs=inputs, layout=LAYOUT
    )
    top = [float(row.softmax(0).max()) for row in logits.detach()]
    assert found.tolist() == pytest.approx([1 + 0.01 * top[0], 0.0, 1 + 0.01 * top[2], -4 + 0.01 * top[3]])
    assert float(sums["top"][0]) == pytest.approx(top[0] + top[2] + top[3])
    assert check_hooks(config_of(**{**CUSTOM, "custom_loss_function_path": "spread:spread"})) == []


def test_a_loss_that_reads_logits_needs_the_whole_vocabulary() -> None:
    algo = AlgoConfig(**{**CUSTOM, "custom_loss_function_path": "spread:spread"})
    megatron = MegatronConfig(tensor_model_parallel_size=2)
    train = TrainConfig(backend=TrainBackendName.megatron)
    config = RunConfig(batch=BatchConfig(rollout_batch_size=1), algo=algo, megatron=megatron, train=train)
    (problem,) = check_hooks(config)
    assert str(problem) == (
        "megatron.tensor_model_parallel_size must be 1 with a loss that has the parameter logits: its ranks divide the "
        "vocabulary, got 2; set it to 1, e.g. with pipeline or context parallelism, or remove the parameter from "
        "spread:spread"
    )
    megatron.tensor_model_parallel_size = 1
    assert check_hooks(config) == []


def test_the_weights_of_the_docs() -> None:
    # old - gen is 0, 2 and -1: weights 1, 0 and 1. With ratio 1 the loss is -A.
    algo = {"use_tis": True, "custom_tis_function_path": "my_weights:near"}
    found, metrics = losses(vector(-1, NAN, -1, -2), **algo)
    assert found.tolist() == [-1.0, 0.0, 0.0, 2.0]
    assert metrics["near"] == pytest.approx(2 / 3)


def test_weights_have_no_gradient_and_masked_ones_never_matter() -> None:
    logprobs = vector(-1, NAN, -1, -2).requires_grad_()
    found, _ = losses(logprobs, use_tis=True, custom_tis_function_path="other_hooks_for_test:nan_where_masked")
    found.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, 0.0, -0.5, 1.0]


def rollout(**changes: Any) -> RolloutInputs:
    values = {
        "rewards_S": vector(0.5, 1.0),
        "group_ids_S": torch.tensor([4, 4]),
        "response_lens_S": torch.tensor([3, 1]),
        "max_response_len": 4,
        "layout": LAYOUT,
        "rollout_logprobs_T": vector(0, 0, 0, 0),
    }
    return RolloutInputs(**{**values, **changes})


def test_the_advantages_of_the_docs() -> None:
    algo = AlgoConfig(custom_advantage_function_path="my_advantages:best_only")
    assert compute_rollout_advantages(algo, rollout()).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_custom_advantages_are_whitened_and_receive_old_logprobs() -> None:
    path = "other_hooks_for_test:from_old"
    algo = AlgoConfig(custom_advantage_function_path=path, normalize_advantages=True)
    actual = compute_rollout_advantages(algo, rollout(old_logprobs_T=vector(1, NAN, 2, 3)))
    torch.testing.assert_close(actual, vector(-1.0, 0.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("custom_loss_function_path", "the loss of other_hooks_for_test:shifted must have shape (4,), got (3,)"),
        (
            "custom_advantage_function_path",
            "the advantages of other_hooks_for_test:short must have shape (4,), got (2,)",
        ),
    ],
)
def test_a_result_of_another_shape_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        if name == "custom_loss_function_path":
            losses(vector(0, 0, 0, 0), loss_type="custom_loss", **{name: "other_hooks_for_test:shifted"})
        else:
            compute_rollout_advantages(AlgoConfig(**{name: "other_hooks_for_test:short"}), rollout())


STEP = StepSamples(
    num_trainable=torch.tensor([2, 0, 4, 1]),
    trajectory_ids=torch.tensor([0, 0, 0, 3]),
    group_ids=torch.tensor([7, 7, 7, 5]),
    rewards=vector(1, 0, 1, 0),
    max_response_len=8,
)


def test_the_reducer_of_the_docs() -> None:
    # Two prompts, of 6 tokens and of 1.
    torch.testing.assert_close(
        compute_custom_weights("my_reducer:by_prompt", STEP), vector(1 / 12, 1 / 12, 1 / 12, 1 / 2)
    )


def test_a_reducer_with_the_default_weights_gives_the_default_loss() -> None:
    layout = TokenLayout.from_lengths(torch.ones(7, dtype=torch.bool), lengths_S=STEP.num_trainable)
    values = torch.arange(7.0).requires_grad_()
    plan = StepPlan(microbatches=((),), num_trajectories=2, num_tokens=7)
    denominators = compute_step_denominators(
        counts_S=STEP.num_trainable, trajectory_ids_S=STEP.trajectory_ids, in_step_S=torch.arange(4)
    )
    shares, gradients = [], []
    for weights in (None, compute_custom_weights("other_hooks_for_test:as_the_default", STEP)):
        reduction = StepReduction(algo=AlgoConfig(), plan=plan, denominators_S=denominators, weights_S=weights)
        share = reduction.reduce(values, layout=layout, samples=torch.arange(4))
        shares.append(share.detach())
        gradients.append(torch.autograd.grad(share, values)[0])
    torch.testing.assert_close(shares[1], shares[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other_number", "the weights of other_hooks_for_test:other_number must have shape (4,), got (1,)"),
        ("infinite", "the weights of other_hooks_for_test:infinite must be finite, got inf for sample 0 of the step"),
    ],
)
def test_reducer_weights_of_wrong_shape_or_value_are_errors(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        compute_custom_weights(f"other_hooks_for_test:{name}", STEP)


BATCH = TrainBatch(
    tokens=np.zeros(7, dtype=np.int32),
    loss_mask=np.array([0, 1, 1, 0, 1, 0, 1], dtype=np.uint8),
    rollout_logprobs=np.zeros(7, dtype=np.float32),
    weight_versions=np.zeros(7, dtype=np.int32),
    offsets=np.array([0, 3, 5, 7]),
    prompt_lens=np.ones(3, dtype=np.int32),
    rewards=np.array([1, 0, 0.5], dtype=np.float32),
    group_ids=np.array([3, 3, 4]),
    trajectory_ids=np.arange(3),
    version=0,
)
COLUMNS = {
    "old_logprobs": None,
    "rollout_logprobs": torch.arange(7.0),
    "ref_logprobs": None,
    "advantages": vector(0, 4, -1, 0, 1, 0, -9),
}
ROWS = np.array([1, 2, 6])  # a rank with the first and the last sample


def test_the_postprocess_of_the_docs() -> None:
    path, custom = "my_postprocess:bounded", {"max_advantage": 2}
    changed, sums = postprocess_columns(path, COLUMNS, batch=BATCH, rows=ROWS, custom=custom)
    assert {name: column.tolist() for name, column in changed.items()} == {"advantages": [0, 2, -1, 0, 1, 0, -2]}
    assert [float(each) for each in sums["bounded"]] == [2.0, 3.0]
    assert COLUMNS["advantages"].tolist() == [0, 4, -1, 0, 1, 0, -9]


def test_postprocess_runs_on_a_rank_without_samples() -> None:
    changed, sums = postprocess_columns("my_postprocess:bounded", COLUMNS, batch=BATCH, rows=ROWS[:0])
    assert changed == {} and [float(each) for each in sums["bounded"]] == [0.0, 0.0]


def test_changes_in_place_are_applied() -> None:
    changed, _ = postprocess_columns("other_hooks_for_test:in_place", COLUMNS, batch=BATCH, rows=ROWS)
    assert changed["advantages"].tolist() == [0, 8, -2, 0, 1, 0, -18] and changed.keys() == {"advantages"}


def test_postprocess_gets_the_trajectories_of_its_samples() -> None:
    batch = replace(BATCH, trajectory_ids=np.array([8, 8, 2]))
    _, sums = postprocess_columns("other_hooks_for_test:of_trajectories", COLUMNS, batch=batch, rows=ROWS)
    assert [float(each) for each in sums["ids"]] == [10.0, 2.0]


def test_advantages_get_a_trajectory_of_two_samples_as_one() -> None:
    # One row of rewards for both: the mean over rows counts it once.
    layout = TokenLayout.from_lengths(torch.ones(4, dtype=torch.bool), lengths_S=torch.tensor([2, 1, 1]))
    given = rollout(
        rewards_S=vector(1.0, 1.0, 0.0),
        group_ids_S=torch.tensor([4, 4, 4]),
        trajectory_ids_S=torch.tensor([9, 9, 5]),
        response_lens_S=torch.tensor([2, 1, 1]),
        layout=layout,
    )
    algo = AlgoConfig(custom_advantage_function_path="other_hooks_for_test:over_the_mean")
    assert compute_rollout_advantages(algo, given).tolist() == [9.5, 9.5, 9.5, 4.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without_old", "old_logprobs of the columns of other_hooks_for_test:without_old must stay a tensor, got None"),
        ("invented", "ref_logprobs of the columns of other_hooks_for_test:invented must stay None, got a tensor"),
        ("unmasked", "the columns of other_hooks_for_test:unmasked must have the given mask and sample_ids"),
        ("cut_off", "rollout_logprobs of the columns of other_hooks_for_test:cut_off must have shape (3,), got (2,)"),
    ],
)
def test_invalid_columns_are_errors(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        postprocess_columns(
            f"other_hooks_for_test:{name}", {**COLUMNS, "old_logprobs": torch.zeros(7)}, batch=BATCH, rows=ROWS
        )


def test_a_parameter_custom_receives_the_node_of_the_config() -> None:
    custom, module = {"scale": 2.0}, "other_hooks_for_test"
    inputs = TokenInputs(
        old_logprobs=vector(-1, 0, -1, -2), rollout_logprobs=vector(-1, 0, -3, -1), advantages=vector(1, 0, 1, -2)
    )
    logprobs = vector(-1, 0, -1, -2)
    loss = AlgoConfig(loss_type="custom_loss", custom_loss_function_path=f"{module}:scaled_loss")
    losses, _ = compute_token_losses(loss, logprobs=logprobs, entropy=None, inputs=inputs, layout=LAYOUT, custom=custom)
    assert losses.tolist() == [2.0, 0.0, 2.0, 4.0]
    weights = AlgoConfig(use_tis=True, custom_tis_function_path=f"{module}:scaled_weights")
    losses, _ = compute_token_losses(
        weights, logprobs=logprobs, entropy=None, inputs=inputs, layout=LAYOUT, custom=custom
    )
    assert losses.tolist() == [-2.0, 0.0, -2.0, 4.0]
    algo = AlgoConfig(custom_advantage_function_path=f"{module}:scaled_advantages")
    advantages = compute_rollout_advantages(algo, rollout(rollout_logprobs_T=vector(1, NAN, 2, 3)), custom=custom)
    assert advantages.tolist() == [2.0, 0.0, 4.0, 6.0]
    assert compute_custom_weights(f"{module}:scaled_reducer", STEP, custom=custom).tolist() == [2.0] * 4


def config_of(**algo: Any) -> RunConfig:
    return RunConfig(batch=BatchConfig(rollout_batch_size=1), algo=AlgoConfig(**algo))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "other_hooks_for_test:two",
            "must be callable with (logprobs, tokens), got other_hooks_for_test:two; its parameters are",
        ),
        ("other_hooks_for_test:number", "must be callable"),
        ("other_hooks_for_test:Loss", "must be a function or an object"),
        ("other_hooks_for_test:gone", "must be importable"),
        ("no_such_module_for_test:f", "No module named 'no_such_module_for_test'"),
    ],
)
def test_functions_that_cannot_be_called_are_errors_at_load(path: str, message: str) -> None:
    (problem,) = check_hooks(config_of(**{**CUSTOM, "custom_loss_function_path": path}))
    assert str(problem).startswith("algo.custom_loss_function_path must") and message in str(problem)


@pytest.mark.parametrize(
    "algo",
    [
        {"custom_loss_function_path": "nowhere:f"},
        {"custom_tis_function_path": "nowhere:f"},
        {"custom_advantage_function_path": "nowhere:f", "loss_type": "sft_loss"},
    ],
)
def test_functions_that_are_never_called_are_not_imported(algo: dict[str, Any]) -> None:
    assert check_hooks(config_of(**algo)) == []


def test_all_errors_are_reported_together() -> None:
    algo = {"custom_advantage_function_path": "nowhere:f", "custom_tis_function_path": "nowhere:g", "use_tis": True}
    assert len(check_hooks(config_of(**algo))) == 2
    with pytest.raises(ConfigError, match=r"algo\.custom_tis_function_path"):
        losses(vector(0, 0, 0, 0), use_tis=True, custom_tis_function_path="nowhere:g")
