"""What a user's loss, advantage and weight functions are given and must give back; the examples of the docs keep it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.config import AlgoConfig, BatchConfig, RunConfig
from rlscale.config.hooks import check_hooks
from rlscale.errors import ConfigError
from rlscale.training.advantages import RolloutInputs, advantages_of_rollout
from rlscale.training.objective import TokenInputs, token_losses

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-loss.md"
NAN = float("nan")
LAYOUT = TokenLayout.from_lengths(torch.tensor([True, False, True, True]), lengths_S=torch.tensor([3, 1]))

OTHERS = """
import torch

def shifted(lp, tokens):
    return lp[1:], {}

def raw(lp, tokens):
    assert tokens.advantages is None and tokens.old is None and tokens.ref is None
    return -lp, {"seen": (lp.detach().sum(), torch.tensor(1.0))}

def of_entropy(lp, tokens):
    return tokens.entropy, {}

def nan_where_masked(tokens):
    return torch.where(tokens.mask, 0.5, float("nan")).requires_grad_(), {}

def short(rollout):
    return rollout.rewards

def from_old(rollout):
    assert rollout.tokens.ref is None
    return rollout.tokens.old

def two(lp, tokens, more): ...

number = 2

class Loss: ...
"""


def vector(*values: float) -> Tensor:
    return torch.tensor(values)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples of the page, as modules of their names, and some more."""
    texts = re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for _, name in texts] == ["my_loss", "my_advantages", "my_weights"]
    for text, name in [*texts, (OTHERS, "other_hooks_for_test")]:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("my_loss", "my_advantages", "my_weights", "other_hooks_for_test"):
        sys.modules.pop(name, None)


def losses(lp: Tensor, *, entropy: Tensor | None = None, **algo: Any) -> tuple[Tensor, dict[str, float]]:
    inputs = TokenInputs(
        old=vector(-1, NAN, -1, -2),
        gen=vector(-1, NAN, -3, -1),
        ref=vector(-1, NAN, -1, -1) if algo.get("use_kl_loss") else None,
        advantages=vector(1, NAN, 1, -2) if algo.pop("advantages", True) else None,
    )
    found, sums = token_losses(AlgoConfig(**algo), lp=lp, entropy=entropy, inputs=inputs, layout=LAYOUT)
    return found, {name: float(total / count) for name, (total, count) in sums.items()}


CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": "my_loss:squared"}


def test_the_loss_of_the_page() -> None:
    # drift 0.5, 0 and -1 with A = 1, 1 and -2: -0.5 + 0.125, 0, -2 + 0.5.
    lp = vector(-0.5, NAN, -1, -3).requires_grad_()
    found, metrics = losses(lp, **CUSTOM)
    assert found.tolist() == [-0.375, 0.0, 0.0, -1.5]
    assert metrics == {"drift": pytest.approx(-0.5 / 3)}
    found.sum().backward()
    assert lp.grad is not None and lp.grad.tolist() == [-0.5, 0.0, -1.0, 1.0]


def test_kl_loss_and_entropy_bonus_are_added_to_it() -> None:
    lp, entropy = vector(-0.5, NAN, -1, -3), vector(1, NAN, 2, 3)
    found, metrics = losses(
        lp, entropy=entropy, **CUSTOM, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01
    )
    kept = found[LAYOUT.mask_T]
    torch.testing.assert_close(kept, vector(-0.375 + 0.0125 - 0.01, -0.02, -1.5 + 0.2 - 0.03))
    assert metrics["kl_loss"] == pytest.approx((0.125 + 2.0) / 3) and metrics["entropy"] == 2.0


def test_without_advantages_only_what_the_engine_knows_is_there() -> None:
    algo = {**CUSTOM, "custom_loss_function_path": "other_hooks_for_test:raw", "compute_advantages_and_returns": False}
    found, metrics = losses(vector(-1, 0, -2, -3), advantages=False, **algo)
    assert found.tolist() == [1.0, 0.0, 2.0, 3.0] and metrics == {"seen": -6.0}


def test_the_entropy_is_there() -> None:
    algo = {**CUSTOM, "custom_loss_function_path": "other_hooks_for_test:of_entropy"}
    assert losses(vector(0, 0, 0, 0), entropy=vector(1, NAN, 2, 3), **algo)[0].tolist() == [1.0, 0.0, 2.0, 3.0]


def test_the_weights_of_the_page() -> None:
    # old - gen is 0, 2 and -1: weights 1, 0 and 1. With ratio 1 the loss is -A.
    algo = {"use_tis": True, "custom_tis_function_path": "my_weights:near"}
    found, metrics = losses(vector(-1, NAN, -1, -2), **algo)
    assert found.tolist() == [-1.0, 0.0, 0.0, 2.0]
    assert metrics["near"] == pytest.approx(2 / 3)


def test_weights_carry_no_gradient_and_matter_at_no_placeholder() -> None:
    lp = vector(-1, NAN, -1, -2).requires_grad_()
    found, _ = losses(lp, use_tis=True, custom_tis_function_path="other_hooks_for_test:nan_where_masked")
    found.sum().backward()
    assert lp.grad is not None and lp.grad.tolist() == [-0.5, 0.0, -0.5, 1.0]


def rollout(**changes: Any) -> RolloutInputs:
    values = {
        "rewards_S": vector(0.5, 1.0),
        "group_ids_S": torch.tensor([4, 4]),
        "response_lens_S": torch.tensor([3, 1]),
        "max_response_len": 4,
        "layout": LAYOUT,
        "gen_T": vector(0, 0, 0, 0),
    }
    return RolloutInputs(**{**values, **changes})


def test_the_advantages_of_the_page() -> None:
    algo = AlgoConfig(custom_advantage_function_path="my_advantages:best_only")
    assert advantages_of_rollout(algo, rollout()).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_custom_advantages_are_whitened_and_see_the_old_policy() -> None:
    path = "other_hooks_for_test:from_old"
    algo = AlgoConfig(custom_advantage_function_path=path, normalize_advantages=True)
    actual = advantages_of_rollout(algo, rollout(old_T=vector(1, NAN, 2, 3)))
    torch.testing.assert_close(actual, vector(-1.0, 0.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("custom_loss_function_path", "the loss of other_hooks_for_test:shifted must have shape (4,), got (3,)"),
        (
            "custom_advantage_function_path",
            "the advantages of other_hooks_for_test:short must have shape (4,), got (2,)",
        ),
    ],
)
def test_a_result_of_another_shape_is_named(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        if name == "custom_loss_function_path":
            losses(vector(0, 0, 0, 0), loss_type="custom_loss", **{name: "other_hooks_for_test:shifted"})
        else:
            advantages_of_rollout(AlgoConfig(**{name: "other_hooks_for_test:short"}), rollout())


def config_of(**algo: Any) -> RunConfig:
    return RunConfig(batch=BatchConfig(rollout_batch_size=1), algo=AlgoConfig(**algo))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "other_hooks_for_test:two",
            "must be callable with (lp, tokens), got other_hooks_for_test:two; its parameters are",
        ),
        ("other_hooks_for_test:number", "must name something that can be called"),
        ("other_hooks_for_test:Loss", "must name a function or an object"),
        ("other_hooks_for_test:gone", "must name something that can be imported"),
        ("no_such_module_for_test:f", "No module named 'no_such_module_for_test'"),
    ],
)
def test_what_cannot_be_called_is_found_before_the_start(path: str, told: str) -> None:
    (problem,) = check_hooks(config_of(**{**CUSTOM, "custom_loss_function_path": path}))
    assert str(problem).startswith("algo.custom_loss_function_path must") and told in str(problem)


@pytest.mark.parametrize(
    "algo",
    [
        {"custom_loss_function_path": "nowhere:f"},
        {"custom_tis_function_path": "nowhere:f"},
        {"custom_advantage_function_path": "nowhere:f", "loss_type": "sft_loss"},
    ],
)
def test_what_is_never_called_is_not_imported(algo: dict[str, Any]) -> None:
    assert check_hooks(config_of(**algo)) == []


def test_several_mistakes_are_found_at_once() -> None:
    algo = {"custom_advantage_function_path": "nowhere:f", "custom_tis_function_path": "nowhere:g", "use_tis": True}
    assert len(check_hooks(config_of(**algo))) == 2
    with pytest.raises(ConfigError, match=r"algo\.custom_tis_function_path"):
        losses(vector(0, 0, 0, 0), use_tis=True, custom_tis_function_path="nowhere:g")
