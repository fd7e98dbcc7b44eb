import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlscale.errors import RewardError
from rlscale.observe.metrics.named_rewards import named_rewards
from rlscale.rewards import RewardRunner
from rlscale.rewards.builtin import exact_match
from rlscale.types import Group, Sample

MakeGroup = Callable[..., Group]


def score(group: Group, reward: Any, *, max_workers: int = 4, key: str | None = None) -> list[float | None]:
    with RewardRunner(reward, max_workers=max_workers) as runner:
        asyncio.run(runner.score(group, key=key))
    return [sample.reward for sample in group.samples]


def test_sets_the_reward_of_every_sample(make_group: MakeGroup) -> None:
    assert score(make_group("2", "3", " 2 "), exact_match) == [1.0, 0.0, 1.0]


def test_integers_and_booleans_are_numbers(make_group: MakeGroup) -> None:
    assert score(make_group("a", "bb"), lambda sample: len(sample.response)) == [1.0, 2.0]
    assert score(make_group("a"), lambda sample: True) == [1.0]


def test_async_rewards_share_one_separate_loop(make_group: MakeGroup) -> None:
    loops = set()

    async def reward(sample: Sample) -> float:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0.01)
        return 2.5

    async def check() -> None:
        with RewardRunner(reward, max_workers=2) as runner:
            await asyncio.gather(*(runner.score(make_group("a", "b")) for _ in range(3)))
        assert loops and asyncio.get_running_loop() not in loops

    asyncio.run(check())
    assert len(loops) == 1


def test_a_blocking_reward_does_not_block_the_loop(make_group: MakeGroup) -> None:
    release = threading.Event()

    def reward(sample: Sample) -> float:
        assert release.wait(10)
        return 1.0

    async def check() -> None:
        with RewardRunner(reward, max_workers=1) as runner:
            scoring = asyncio.create_task(runner.score(make_group("a")))
            await asyncio.sleep(0.05)
            assert not scoring.done()  # and this line was reached
            release.set()
            await scoring

    asyncio.run(check())


def test_no_more_than_max_workers_at_once(make_group: MakeGroup) -> None:
    lock, busy, most = threading.Lock(), 0, 0

    def reward(sample: Sample) -> float:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.01)
        with lock:
            busy -= 1
        return 0.0

    score(make_group(*"abcdefgh"), reward, max_workers=3)
    assert most == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_names_the_sample_and_the_cause(is_async: bool, make_group: MakeGroup) -> None:
    def plain(sample: Sample) -> float:
        if sample.index == 1:
            raise ConnectionError("judge is down")
        return 1.0

    async def later(sample: Sample) -> float:
        return plain(sample)

    group = make_group("a", "b")
    message = r"reward of sample 1 \(group 0, prompt row 2\) failed: ConnectionError: judge is down"
    with pytest.raises(RuntimeError, match=message) as caught:
        score(group, later if is_async else plain)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert [sample.reward for sample in group.samples] == [None, None]


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0]])
def test_a_non_finite_reward_is_never_a_zero(value: object, make_group: MakeGroup) -> None:
    with pytest.raises(RuntimeError, match=r"reward of sample 0 .* must be a finite number, got"):
        score(make_group("a"), lambda sample: value)


def test_a_reward_with_resources_is_closed(make_group: MakeGroup) -> None:
    class Judge:
        is_closed = False

        def __call__(self, sample: Sample) -> float:
            return 1.0

        def close(self) -> None:
            self.is_closed = True

    judge = Judge()
    score(make_group("a"), judge)
    assert judge.is_closed


def test_reward_key_selects_a_number_and_all_are_stored(make_group: MakeGroup) -> None:
    group = make_group("2", "33")
    given = score(group, lambda sample: {"right": 1, "length": len(sample.response), "error": "none"}, key="length")
    assert given == [1.0, 2.0]
    assert group.samples[1].metadata["rewards"] == {"right": 1, "length": 2, "error": "none"}
    assert named_rewards(group.samples) == {"reward/length/mean": 1.5, "reward/right/mean": 1.0}


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"a": 1, "b": 2}, None, "must be a finite number, got a mapping; set reward.key to one of a, b"),
        ({"a": 1, "b": 2}, "c", "must have an entry 'c', got a, b; set reward.key, or eval.reward_key"),
        (1.0, "a", "must be a mapping with reward.key=a, got 1.0; remove reward.key"),
        ({"a": "x"}, "a", "must be a finite number, got 'x'"),
    ],
)
def test_a_reward_key_that_does_not_fit_is_an_error(make_group: MakeGroup, value: Any, key: str, message: str) -> None:
    with pytest.raises(RewardError, match=re.escape(message)):
        score(make_group("2"), lambda sample: value, key=key)
