import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from rlscale.data.batch import build_batch
from rlscale.errors import RewardError
from rlscale.observe.metrics.named_rewards import named_rewards
from rlscale.rewards import RewardFunctions, RewardRunner
from rlscale.rewards.builtin import exact_match
from rlscale.rewards.reward_runner import MAX_FIRST_FAILURES, UserTraceback, describe_sample
from rlscale.types import Failure, FailureCause, Group, Sample, SampleStatus

MakeGroup = Callable[..., Group]


def score(group: Group, reward: Any, *, key: str | None = None) -> dict[int, Failure]:
    with RewardRunner(reward, source="train.jsonl") as runner:
        return asyncio.run(runner.score(group.samples, key=key))


def rewards_of(group: Group) -> list[float | None]:
    return [sample.reward for sample in group.samples]


def test_sets_the_reward_of_every_sample(make_group: MakeGroup) -> None:
    group = make_group("2", "3", " 2 ")
    assert score(group, exact_match) == {}
    assert rewards_of(group) == [1.0, 0.0, 1.0]


def test_integers_and_booleans_are_numbers(make_group: MakeGroup) -> None:
    group = make_group("a", "bb")
    assert score(group, lambda sample: len(sample.response)) == {}
    assert rewards_of(group) == [1.0, 2.0]
    assert score(group, lambda sample: sample.index == 0) == {}
    assert rewards_of(group) == [1.0, 0.0]


def test_a_coroutine_of_rlscale_is_awaited(make_group: MakeGroup) -> None:
    async def reward(sample: Sample) -> float:
        await asyncio.sleep(0)
        return 2.5

    group = make_group("a", "b")
    assert score(group, reward) == {}
    assert rewards_of(group) == [2.5, 2.5]


def test_a_failure_is_a_value_that_names_the_sample_and_the_cause(make_group: MakeGroup) -> None:
    def reward(sample: Sample) -> float:
        if sample.index == 1:
            raise ConnectionError("judge is down")
        return 1.0

    group = make_group("a", "b", "c")
    failures = score(group, reward)
    assert rewards_of(group) == [1.0, None, 1.0]
    assert list(failures) == [1] and failures[1].cause is FailureCause.grader
    where = "reward of sample 1 (row 2 of train.jsonl, prompt '1+1=', label '2', answer 'b') failed: "
    assert failures[1].message.startswith(f"{where}ConnectionError: judge is down (")
    assert re.search(r"test_reward_runner\.py:\d+ in reward\)$", failures[1].message)


@pytest.mark.parametrize(
    "value", [None, "1", float("nan"), float("inf"), [1.0], 10**400, pytest.param(10**5000, id="no text"), 1j]
)
def test_a_value_that_is_no_finite_number_is_never_a_zero(value: object, make_group: MakeGroup) -> None:
    group = make_group("a")
    failures = score(group, lambda sample: value)
    assert re.search(r"answer 'a'\) must be a finite number, got ", failures[0].message)
    assert rewards_of(group) == [None]


def test_long_texts_are_shortened_to_their_ends(make_sample: Callable[..., Sample]) -> None:
    sample = make_sample("x" * 100 + "end", label=None, index=4)
    text = describe_sample(sample, source="f.jsonl")
    assert text.startswith("reward of sample 4 (row 5 of f.jsonl, prompt '1+1=', no label, answer '...xxx")
    assert text.endswith("xend')") and len(text) < 160


def test_a_reward_that_never_works_stops_the_run_with_the_line(make_group: MakeGroup) -> None:
    def reward(sample: Sample) -> float:
        raise KeyError("unit")

    with RewardRunner(reward) as runner:
        group = make_group(*"a" * (MAX_FIRST_FAILURES - 1))
        assert len(asyncio.run(runner.score(group.samples))) == MAX_FIRST_FAILURES - 1
        with pytest.raises(
            RewardError, match=r"the first 32 samples of the run all failed; .*KeyError: 'unit'"
        ) as caught:
            asyncio.run(runner.score(make_group("b").samples))
    assert "test_reward_runner.py:" in str(caught.value)
    assert isinstance(caught.value.__cause__, UserTraceback) and 'raise KeyError("unit")' in str(caught.value.__cause__)


def test_one_sample_with_a_reward_keeps_the_run_alive(make_group: MakeGroup) -> None:
    def reward(sample: Sample) -> float:
        if sample.index:
            raise KeyError("unit")
        return 1.0

    with RewardRunner(reward) as runner:
        failures = asyncio.run(runner.score(make_group(*"a" * (2 * MAX_FIRST_FAILURES)).samples))
    assert sorted(failures) == list(range(1, 2 * MAX_FIRST_FAILURES))


def test_weights_sum_named_rewards_and_reach_the_batch(make_group: MakeGroup) -> None:
    group = make_group("a", "bb", "ccc", "d" * 10)
    weights = {"right": 1.0, "length": 0.5}
    values: Any = lambda s: {"length": len(s.response), "right": s.index == 0, "note": "x"}  # noqa: E731
    with RewardRunner(values, weights=weights) as runner:
        assert asyncio.run(runner.score(group.samples)) == {}
        assert rewards_of(group) == [1.5, 1.0, 1.5, 5.0]
        assert group.samples[0].metadata["rewards"] == {"length": 1.0, "right": 1.0, "note": "x"}
        assert asyncio.run(runner.score(group.samples, key="length")) == {}
        assert rewards_of(group) == [1.0, 2.0, 3.0, 10.0]  # eval.reward_key takes precedence
    for sample in group.samples:
        sample.append([5, 6], logprobs=[0.0, 0.0], weight_versions=[0, 0])
        sample.status = SampleStatus.completed
    batch = build_batch([group], version=0)
    assert (batch.reward_names, batch.reward_weights) == (("right", "length"), (1.0, 0.5))
    assert batch.named_rewards is not None
    assert batch.named_rewards.tolist() == [[1, 1], [0, 2], [0, 3], [0, 10]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "must be a mapping with reward.weights, got 1.0; remove reward.weights"),
        ({"b": 1.0}, "must have an entry 'a', got b; correct reward.weights"),
        ({"a": "high"}, "must be a finite number, got 'high'"),
        ({"a": 1e308}, "must be a finite number, got inf"),
    ],
)
def test_a_value_that_does_not_fit_the_weights_is_a_failure(make_group: MakeGroup, value: Any, message: str) -> None:
    with RewardRunner(lambda sample: value, weights={"a": 10.0}) as runner:
        assert message in asyncio.run(runner.score(make_group("2").samples))[0].message


def test_reward_key_selects_a_number_and_all_are_stored(make_group: MakeGroup) -> None:
    group = make_group("2", "33")
    values: Any = lambda sample: {"right": 1, "length": len(sample.response), "error": "none"}  # noqa: E731
    assert score(group, values, key="length") == {}
    assert rewards_of(group) == [1.0, 2.0]
    assert group.samples[1].metadata["rewards"] == {"right": 1, "length": 2, "error": "none"}
    assert named_rewards(group.samples) == {"reward/length/mean": 1.5, "reward/right/mean": 1.0}


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"a": 1, "b": 2}, None, "must be a finite number, got a mapping; set reward.key to one of a, b"),
        ({"a": 1, "b": 2}, "c", "must have an entry 'c', got a, b; set reward.key, or eval.reward_key"),
        (1.0, "a", "must be a mapping with reward.key=a, got 1.0; remove reward.key"),
        ({"a": "x"}, "a", "must be a finite number, got 'x'"),
        ({"a": float("nan")}, "a", "must be a finite number, got nan"),
    ],
)
def test_a_reward_key_that_does_not_fit_is_a_failure(make_group: MakeGroup, value: Any, key: str, message: str) -> None:
    assert message in score(make_group("2"), lambda sample: value, key=key)[0].message


def functions(**named: Any) -> RewardFunctions:
    return RewardFunctions(functions=named)


def test_functions_are_summed_by_their_weights_and_all_values_are_metrics(make_group: MakeGroup) -> None:
    several: Any = lambda sample: {"words": len(sample.response.split()), "tone": "dry"}  # noqa: E731
    group, weights = make_group("2", "3 4"), {"right": 1.0, "style/words": 0.25}
    with RewardRunner(functions(right=exact_match, style=several), weights=weights) as runner:
        assert asyncio.run(runner.score(group.samples)) == {}
        assert rewards_of(group) == [1.25, 0.5]
        assert group.samples[1].metadata["rewards"] == {"right": 0.0, "style/words": 2, "style/tone": "dry"}
        assert group.samples[1].metadata["reward_weights"] == weights
        assert asyncio.run(runner.score(group.samples, key="style/words")) == {}
        assert rewards_of(group) == [1.0, 2.0]  # eval.reward_key takes precedence
    assert named_rewards(group.samples) == {"reward/right/mean": 0.5, "reward/style/words/mean": 1.5}


def test_the_failure_of_one_function_is_that_of_the_sample(make_group: MakeGroup) -> None:
    def style(sample: Sample) -> float:
        if sample.index == 1:
            raise ConnectionError("judge is down")
        return 0.5

    group = make_group("2", "2")
    with RewardRunner(functions(right=exact_match, style=style), weights={"right": 1.0}) as runner:
        failures = asyncio.run(runner.score(group.samples))
    assert rewards_of(group) == [1.0, None]
    assert failures[1].message.startswith("reward style of sample 1 (row 2 of the prompts, ")
    assert "failed: ConnectionError: judge is down" in failures[1].message


def test_a_function_without_the_weighted_value_is_a_failure(make_group: MakeGroup) -> None:
    several: Any = lambda sample: {"words": 1, "tone": "dry"}  # noqa: E731
    expected = {
        "style": "must return a value 'style', got style/words, style/tone; set reward.weights or reward.key to it",
        "style/length": "must return a value 'style/length', got style/words, style/tone; set",
        "style/tone": "must be a finite number, got 'dry'",
    }
    for name, message in expected.items():
        group = make_group("2")
        with RewardRunner(functions(right=exact_match, style=several), weights={name: 1.0}) as runner:
            assert message in asyncio.run(runner.score(group.samples))[0].message
        assert rewards_of(group) == [None]
