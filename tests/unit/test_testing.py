"""The helpers of `rlscale.testing`, used as on the page of plug-ins."""

from typing import Any

import pytest

from rlscale import testing
from rlscale.testing import ContractError, adapt, check_dynamic_filter, check_reward, example_args


def score(sample: Any) -> float:
    return float(sample.response == sample.prompt.label)


def document_score(args: Any, sample: Any, **kwargs: Any) -> float:
    return float(args.bonus * (sample.response == sample.label))


def spread(args: Any, samples: Any, **kwargs: Any) -> bool:
    return len({sample.reward for sample in samples}) > 1


def nothing() -> None: ...


def test_a_function_of_either_form_is_checked() -> None:
    assert check_reward(adapt("reward", score)) == [1.0] + [0.0] * 7
    assert check_reward(adapt("reward", document_score, custom={"bonus": 3})) == [3.0] + [0.0] * 7
    assert check_dynamic_filter(adapt("dynamic_filter", spread)) == [True, "spread"]


async def polite(args: Any, sample: Any, judge: Any, **kwargs: Any) -> float:
    return float("yes" in await judge.generate([{"role": "user", "content": f"Is it polite? {sample.response}"}]))


def test_a_reward_that_asks_a_judge_gets_an_example() -> None:
    assert check_reward(adapt("reward", polite)) == [0.0] * 8
    judge = testing.ExampleJudge(text="yes")
    assert check_reward(adapt("reward", polite, judge=judge)) == [1.0] * 8
    assert len(judge.prompts) == 8


def test_a_function_with_other_parameters_breaks_its_contract() -> None:
    with pytest.raises(ContractError, match=r"callable with \(sample\) or \(args, sample\), got its"):
        adapt("reward", nothing)


def test_args_have_the_defaults_and_custom_values() -> None:
    args = example_args(custom={"max_turns": 3})
    assert (args.max_turns, args.rollout_batch_size, args.n_samples_per_prompt) == (3, 2, 4)


def test_every_name_that_is_offered_exists() -> None:
    assert all(hasattr(testing, name) for name in testing.__all__)
