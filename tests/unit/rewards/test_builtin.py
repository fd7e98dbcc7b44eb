from collections.abc import Callable

import pytest

from rlscale.rewards.builtin import exact_match, random_reward, zero_reward
from rlscale.rewards.last_box import BoxedReward
from rlscale.types import ANSWER, Sample


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("25", "25", 1.0), (" 25\n", "25 ", 1.0), ("025", "25", 0.0), ("", "25", 0.0), ("", "", 1.0)],
)
def test_exact_match(response: str, label: str, reward: float, make_sample: Callable[..., Sample]) -> None:
    assert exact_match(make_sample(response, label=label)) == reward


def test_only_the_last_answer_is_graded(make_sample: Callable[..., Sample]) -> None:
    sample = make_sample("add 10 1525", label="25")
    assert exact_match(sample) == 0.0
    sample.metadata[ANSWER] = "25"
    assert exact_match(sample) == 1.0
    sample.metadata[ANSWER] = r"so \boxed{25}"
    assert exact_match(sample) == 0.0 and BoxedReward(exact_match)(sample) == 1.0


def test_exact_match_needs_a_label(make_sample: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match=r"must have a label; set data\.label_key"):
        exact_match(make_sample("25"))


def test_the_random_reward_depends_on_the_seed_alone(make_sample: Callable[..., Sample]) -> None:
    tosses = [random_reward(make_sample("a", seed=seed)) for seed in range(400)]
    assert tosses == [random_reward(make_sample("b", index=9, seed=seed)) for seed in range(400)]
    assert set(tosses) == {0.0, 1.0} and 150 < sum(tosses) < 250


def test_the_zero_reward_needs_no_label(make_sample: Callable[..., Sample]) -> None:
    assert [zero_reward(make_sample("a", label=label)) for label in (None, "a")] == [0.0, 0.0]
