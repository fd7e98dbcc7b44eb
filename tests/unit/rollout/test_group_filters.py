"""Built-in filters of finished groups: which groups they drop, and the reason in the ledger."""

from collections.abc import Sequence

import pytest

from rlscale.config import load_config
from rlscale.errors import ConfigError
from rlscale.plugins.load_plugin import load_plugin
from rlscale.rollout.group_filters import GroupFilters, accuracy_limits, reward_std
from rlscale.rollout.group_generator import MAX_BACKOFF_S, _backoff_s
from rlscale.types import Group, Prompt, Sample

FILTERS = "rlscale.rollout.group_filters"
BAND = {"accuracy_band": [0.25, 0.75]}


def group_of(rewards: Sequence[float], *, ids: Sequence[int] | None = None) -> Group:
    """A group with one sample for each reward; samples with equal ids are paths of one trajectory."""
    prompt = Prompt(index=0, text="1+1=", token_ids=(1, 2))
    numbers = range(len(rewards)) if ids is None else ids
    samples = [
        Sample(index=index, group_index=0, prompt=prompt, seed=0, reward=reward)
        for index, reward in zip(numbers, rewards, strict=True)
    ]
    return Group(index=0, prompt=prompt, samples=samples)


def filters_of(path: str) -> GroupFilters:
    return GroupFilters(dynamic=load_plugin("sampling.dynamic_filter_path", path, args=None, custom=BAND))


@pytest.mark.parametrize(
    ("name", "rewards", "reason"),
    [
        ("reward_std", [0, 0, 0], "equal_rewards"),
        ("reward_std", [0.3, 0.3 + 1e-9], "equal_rewards"),
        ("reward_std", [0, 0, 1], None),
        ("reward_std", [0], None),
        ("reward_std_with_fallback", [1, 1], "equal_rewards"),
        ("reward_std_with_fallback", [1, 0], None),
        ("accuracy_band", [0, 0, 0, 0], "too_hard"),
        ("accuracy_band", [0, 0, 0, 1], None),
        ("accuracy_band", [0, 1, 1, 1], None),
        ("accuracy_band", [1, 1, 1, 1], "too_easy"),
    ],
)
def test_a_built_in_filter_drops_with_its_reason(name: str, rewards: list[float], reason: str | None) -> None:
    assert filters_of(f"{FILTERS}:{name}").reason_to_drop(group_of(rewards)) == reason


def test_only_the_fallback_fills_a_rollout_with_dropped_groups() -> None:
    names = ("reward_std", "reward_std_with_fallback", "accuracy_band")
    assert [filters_of(f"{FILTERS}:{name}").fills_rollouts for name in names] == [False, True, False]


def test_paths_of_one_trajectory_count_once() -> None:
    # Two trajectories of reward 1, one of them with three paths, and one of reward 0.
    group = group_of([1, 1, 1, 1, 0], ids=[0, 0, 0, 1, 2])
    assert filters_of(f"{FILTERS}:accuracy_band").reason_to_drop(group) is None
    assert filters_of(f"{FILTERS}:reward_std").reason_to_drop(group_of([1, 1, 1], ids=[0, 0, 0])) is None


def named(group: Group, *, weights: dict[str, float], rewards: Sequence[dict[str, float]]) -> Group:
    """The group with named rewards."""
    for sample, names in zip(group.samples, rewards, strict=True):
        sample.metadata |= {"rewards": names, "reward_weights": weights}
    return group


def test_equal_sums_of_different_named_rewards_differ_by_name() -> None:
    rewards = [{"a": 1.0, "b": 0.0, "c": 1.0}, {"a": 0.0, "b": 1.0, "c": 7.0}]
    group = named(group_of([1, 1]), weights={"a": 1.0, "b": 1.0, "c": 0.0}, rewards=rewards)
    assert reward_std(group) == "equal_rewards" and reward_std(group, by_name=True) is True
    # A reward that does not count gives no gradient.
    group = named(group_of([1, 1]), weights={"c": 0.0}, rewards=rewards)
    assert reward_std(group, by_name=True) == "equal_rewards"
    # Graded by the user's generate function: there are no names.
    assert reward_std(group_of([1, 1]), by_name=True) == "equal_rewards"


def test_the_filter_of_dapo_drops_equal_rewards() -> None:
    path = load_config(["experiment=quickstart", "algo=dapo"]).sampling.dynamic_filter_path
    assert path is not None
    filters = filters_of(path)
    assert filters.reason_to_drop(group_of([1, 1])) == "equal_rewards"
    assert filters.reason_to_drop(group_of([1, 0])) is None


@pytest.mark.parametrize("band", [None, [0.1], [0.9, 0.1], ["a", "b"]])
def test_a_band_needs_two_numbers_in_order(band: object) -> None:
    with pytest.raises(ConfigError, match=r"custom\.accuracy_band must be two numbers, the lower one first"):
        accuracy_limits({"accuracy_band": band})


def test_the_wait_before_a_retry_doubles_up_to_its_limit() -> None:
    assert [_backoff_s(attempt) for attempt in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert _backoff_s(200) == _backoff_s(5000) == MAX_BACKOFF_S == 30
