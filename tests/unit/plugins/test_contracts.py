"""Each check accepts a right function and names what a wrong one returns."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlscale.config.user_functions import HOOKS
from rlscale.plugins import contracts
from rlscale.plugins.contracts import CONTRACTS, ContractError
from rlscale.plugins.example_groups import example_groups
from rlscale.plugins.load_plugin import ADAPTERS
from rlscale.plugins.sample_view import DocumentSample
from rlscale.testing import adapt, check_loss
from rlscale.types import Prompt


async def async_score(sample: Any) -> float:
    return 0.5


def mask_wrong(groups: Any) -> None:
    for group in groups:
        for sample in group.samples:
            if not sample.reward:
                sample.loss_mask = (
                    sample.loss_mask * 0 if hasattr(sample.loss_mask, "dtype") else [0] * sample.response_len
                )


def shorten(groups: Any) -> None:
    groups[0].samples[0].loss_mask = []


def regrade(groups: Any) -> None:
    groups[0].samples[0].reward = 7.0


def rename(rollout_id: int, groups: Any, metrics: dict[str, float]) -> None:
    metrics["mine"] = len(groups)


def log_text(rollout_id: int, groups: Any, metrics: Any) -> None:
    metrics["mine"] = "high"


def test_the_example_has_right_wrong_and_truncated_samples() -> None:
    groups = example_groups()
    assert [[sample.reward for sample in group.samples] for group in groups] == [[1.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert {str(sample.status) for group in groups for sample in group.samples} == {"completed", "truncated"}
    assert all(sample.response_len == len(sample.response) for group in groups for sample in group.samples)


@pytest.mark.parametrize(
    ("check", "function", "expected"),
    [
        (contracts.check_reward, lambda sample: 1, [1.0] * 8),
        (contracts.check_reward, async_score, [0.5] * 8),
        (contracts.check_reward, lambda sample: {"a": np.float32(1.0), "why": "x"}, [{"a": 1.0, "why": "x"}] * 8),
        (contracts.check_group_reward, lambda samples: np.arange(len(samples)), [[0.0, 1.0, 2.0, 3.0]] * 2),
        (contracts.check_dynamic_filter, lambda group: group.index == 0 or "late", [True, "late"]),
        (contracts.check_buffer_filter, lambda buffer, number: buffer[-number:], [1]),
        (contracts.check_sample_filter, mask_wrong, 7),
        (contracts.check_reward_post_process, lambda groups: [0.5] * 8, [0.5] * 8),
        (contracts.check_rollout_log, rename, {"reward/mean": 0.5, "time/rollout_s": 1.5, "mine": 2}),
        (contracts.check_rollout_log, lambda *given: True, {}),
        (contracts.check_eval_log, rename, {"eval/example/reward_mean": 0.5, "mine": 1}),
    ],
)
def test_a_right_function_passes(check: Callable[..., Any], function: Callable[..., Any], expected: Any) -> None:
    assert check(function) == expected


def draw_and_generate(rollout_id: int, context: Any) -> Any:
    async def run() -> list[Any]:
        return [await context.generate(group) for group in context.draw(context.num_groups)]

    return run()


def squared(logprobs: Any, tokens: Any) -> Any:
    return -logprobs * tokens.advantages, {"entropy_of_mine": (tokens.entropy.sum(), tokens.mask.sum())}


def of_logits(logprobs: Any, tokens: Any, logits: Any) -> Any:
    return logits.logsumexp(-1), {"width": (float(logits.shape[1]), 1.0)}


def test_a_loss_is_checked_with_and_without_logits() -> None:
    losses, metrics = check_loss(squared)
    assert losses.shape == (6,) and metrics["entropy_of_mine"][1] == 5.0
    assert check_loss(of_logits)[1] == {"width": (5.0, 1.0)}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logprobs, tokens: logprobs, "return .the loss at each token"),
        (lambda logprobs, tokens: (logprobs.mean(), {}), "the loss at each of the 6 tokens"),
        (lambda logprobs, tokens: (logprobs.detach(), {}), "depend on logprobs"),
        (lambda logprobs, tokens: (logprobs / 0, {}), "return finite losses"),
        (lambda logprobs, tokens: (logprobs, {"kl": 1.0}), r"metrics as \(sum, count\), got 1.0 for kl"),
        (lambda logprobs, tokens: (logprobs, {"kl": (logprobs, 1)}), "metrics of single finite numbers"),
    ],
)
def test_a_wrong_loss_is_named(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_loss(loss)


def test_rollout_and_eval_functions_are_checked() -> None:
    assert [group.index for group in contracts.check_rollout(draw_and_generate)] == [0, 1]
    with pytest.raises(ContractError, match=r"must return 2 groups that it drew, each once, got groups \[0\]"):
        contracts.check_rollout(lambda rollout_id, context: context.draw(1))
    assert contracts.check_evaluation(lambda rollout_id, context: {"aime": [1, 0.5]}) == {"aime": [1, 0.5]}
    with pytest.raises(ContractError, match="must return rewards by the name of their set"):
        contracts.check_evaluation(lambda rollout_id, context: {"aime": [None]})


@pytest.mark.parametrize(
    ("check", "function", "message"),
    [
        (contracts.check_reward, lambda sample: None, "must return a finite number, or numbers by name, got None"),
        (contracts.check_reward, lambda sample: float("nan"), "got nan"),
        (contracts.check_reward, lambda sample: 10**400, "must return a finite number"),
        (contracts.check_reward, lambda sample: {"why": "x"}, "got {'why': 'x'}"),
        (contracts.check_group_reward, lambda samples: [1.0], "must return a list of 4 numbers, .* got 1"),
        (contracts.check_group_reward, lambda samples: 1.0, "must return a list of 4 numbers, .* got float"),
        (contracts.check_dynamic_filter, lambda group: None, "must return a bool, or a reason .* got None"),
        (contracts.check_dynamic_filter, lambda group: "", "must return a bool, or a reason"),
        (contracts.check_buffer_filter, lambda buffer, number: buffer, r"at most 1 groups .* got groups \[0, 1\]"),
        (contracts.check_buffer_filter, lambda buffer, number: example_groups(9)[8:], r"got groups \[8\]"),
        (contracts.check_sample_filter, shorten, "must change loss masks only"),
        (contracts.check_sample_filter, regrade, "must change loss masks only"),
        (
            contracts.check_sample_filter,
            list.clear,
            "must keep all samples, and set the loss masks of some to 0, got 0 of",
        ),
        (contracts.check_reward_post_process, lambda groups: [0.5], "must return a list of 8 numbers"),
        (contracts.check_rollout_log, lambda *given: 1, "must return true, false or nothing, got 1"),
        (contracts.check_rollout_log, log_text, "must set finite numbers as metrics, got 'high' for mine"),
    ],
)
def test_a_wrong_function_is_named(check: Callable[..., Any], function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check(function)


class Counting:
    """A data source; `restores` false: it forgets its position."""

    def __init__(self, args: Any, *, restores: bool = True) -> None:
        self.args, self.position, self.restores = args, 0, restores

    def get_samples(self, num_samples: int) -> list[list[DocumentSample]]:
        first, self.position = self.position, self.position + num_samples
        return [[DocumentSample(prompt=f"{self.args.first + i}+1=")] for i in range(first, self.position)]

    def save(self, rollout_id: int) -> None:
        Path(self.args.save, "position").write_text(str(self.position))

    def load(self, rollout_id: int) -> None:
        self.position = int(Path(self.args.load, "position").read_text()) if self.restores else 0


def test_data_sources_are_checked() -> None:
    make = adapt("data_source", lambda args: Counting(args), custom={"first": 5})
    assert [prompt.text for prompt in contracts.check_data_source(make)] == ["5+1=", "6+1="]
    forgets = adapt("data_source", lambda args: Counting(args, restores=False), custom={"first": 5})
    with pytest.raises(
        ContractError, match=r"continue at its position with \['7\+1=', '8\+1='\], got \['5\+1=', '6\+1='\]"
    ):
        contracts.check_data_source(forgets)


@pytest.mark.parametrize(
    ("prompts", "state", "message"),
    [
        ([], {}, r"must return 2 prompts, got \[\]"),
        (
            [Prompt(index=0, text="", token_ids=())] * 2,
            {},
            "must return prompts of at least one token, got none in prompt 0",
        ),
        ([Prompt(index=0, text="1", token_ids=(1,))] * 2, {1: 2}, r"must return a dict of JSON values from state_dict"),
    ],
)
def test_a_wrong_data_source_is_named(prompts: list[Prompt], state: dict[Any, int], message: str) -> None:
    source = SimpleNamespace(take=lambda number: prompts, state_dict=lambda: state)
    with pytest.raises(ContractError, match=message):
        contracts.check_data_source(lambda config, tokenizer: source)


def test_every_contract_and_adapter_belongs_to_a_hook() -> None:
    assert {contract.key for contract in CONTRACTS.values()} <= HOOKS.keys()
    assert ADAPTERS.keys() <= HOOKS.keys()
    assert all(HOOKS[key].document_arguments for key in ADAPTERS)
