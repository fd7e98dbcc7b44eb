"""Order of prompts by expected length and difficulty; see also the whole loop in tests/unit/control."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlscale.config import SamplingConfig, ScheduleName
from rlscale.rollout.prompt_schedule import PromptSchedule
from rlscale.types import Group, Prompt, Sample, SampleStatus

NUM_PROMPTS = 20


class Cycle:
    """Numbered prompts, epoch after epoch."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return NUM_PROMPTS

    def take(self, num_prompts: int) -> list[Prompt]:
        first, self.position = self.position, self.position + num_prompts
        rows = [i % NUM_PROMPTS for i in range(first, self.position)]
        return [Prompt(index=row, text=str(row), token_ids=(1, row)) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def schedule(name: ScheduleName = ScheduleName.plain, weights: list[float] | None = None) -> PromptSchedule:
    return PromptSchedule(Cycle(), SamplingConfig(schedule=name, difficulty_weights=weights), seed=3)


def group(prompt: Prompt, *, length: int, reward: float = 1.0) -> Group:
    sample = Sample(index=prompt.index, group_index=prompt.index, prompt=prompt, seed=0)
    sample.append([1] * length, logprobs=[0.0] * length, weight_versions=[0] * length)
    sample.status, sample.reward = SampleStatus.completed, reward
    return Group(index=prompt.index, prompt=prompt, samples=[sample])


def length_of(row: int) -> int:
    return 1 + (row * 7) % NUM_PROMPTS


def observe_epoch(each: PromptSchedule) -> None:
    prompts = each.take(NUM_PROMPTS)
    each.observe([group(p, length=length_of(p.index), reward=p.index / NUM_PROMPTS) for p in prompts], rollout_id=0)


def rows(prompts: Sequence[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


@pytest.mark.parametrize("name", list(ScheduleName))
def test_without_lengths_the_order_is_that_of_the_source(name: ScheduleName) -> None:
    assert rows(schedule(name).take(8)) == list(range(8))


def test_the_longest_expected_responses_come_first() -> None:
    each = schedule(ScheduleName.longest_first)
    observe_epoch(each)
    found = rows(each.take(8))
    assert sorted(found) == list(range(8))
    assert [length_of(row) for row in found] == sorted(map(length_of, found), reverse=True)


def test_a_prompt_without_a_length_counts_as_the_mean() -> None:
    each = schedule(ScheduleName.longest_first)
    each.observe([group(Cycle().take(2)[i], length=length) for i, length in enumerate((10, 2))], rollout_id=0)
    assert rows(each.take(3)) == [0, 2, 1]


def test_long_prompts_get_a_rollout_of_their_own() -> None:
    each = schedule(ScheduleName.tail_batching)
    observe_epoch(each)
    drawn = [rows(each.take(4)) for _ in range(10)]
    long = {row for row in range(NUM_PROMPTS) if length_of(row) > NUM_PROMPTS * 0.8}
    shares = [sum(row in long for row in draw) for draw in drawn]
    assert set(shares) == {0, 4}, "no rollout has both"
    # None is lost: all prompts of the two epochs are drawn, apart from those that wait.
    counts = Counter(row for draw in drawn for row in draw)
    assert max(counts.values()) <= 3 and len(counts) == NUM_PROMPTS


def test_replacements_are_short() -> None:
    each = schedule(ScheduleName.tail_batching)
    observe_epoch(each)
    limit = NUM_PROMPTS * 0.8
    assert all(length_of(row) <= limit for _ in range(10) for row in rows(each.take(4, starts_rollout=False)))


def test_prompts_are_drawn_by_the_weight_of_their_difficulty() -> None:
    each = schedule(weights=[1.0, 0.0, 0.5, 0.1])
    observe_epoch(each)
    counts = Counter(row * 4 // NUM_PROMPTS for row in rows(each.take(1600)))
    assert counts[1] == 0
    assert counts[2] / counts[0] == pytest.approx(0.5, abs=0.1)
    assert counts[3] / counts[0] == pytest.approx(0.1, abs=0.05)


def test_a_draw_ends_where_all_known_prompts_have_weight_0() -> None:
    each = schedule(weights=[0.0, 1.0])
    prompts = each.take(NUM_PROMPTS)
    each.observe([group(prompt, length=1, reward=0.0) for prompt in prompts], rollout_id=0)
    assert len(each.take(2)) == 2


def test_dropped_groups_count_once_their_rollout_is_trained_on() -> None:
    each = schedule(weights=[1.0, 0.0])
    prompts = each.take(NUM_PROMPTS)
    solved, others = prompts[:12], prompts[12:]
    for number, prompt in enumerate(solved):
        each.observe_dropped(group(prompt, length=3, reward=1.0), rollout_id=number // 6)
    assert rows(each.take(NUM_PROMPTS)) == rows(prompts), "no rollout is trained on yet"
    each.observe([group(prompt, length=3, reward=0.0) for prompt in others], rollout_id=0)
    assert set(rows(each.take(50))) == set(range(6, NUM_PROMPTS)), "the second six are of the next rollout"
    each.observe([], rollout_id=1)
    assert set(rows(each.take(50))) == set(rows(others))


def test_the_mean_reward_is_over_dropped_and_trained_groups() -> None:
    each = schedule(ScheduleName.longest_first)
    prompt = Cycle().take(1)[0]
    for number, (reward, length) in enumerate([(1.0, 9), (1.0, 2), (0.0, 5)]):
        found = group(prompt, length=length, reward=reward)
        if reward:
            each.observe_dropped(found, rollout_id=number)
        each.observe([] if reward else [found], rollout_id=number)
    assert each.state_dict()["stats"] == {"0": {"num_groups": 3, "length": 5.0, "accuracy": pytest.approx(2 / 3)}}


def test_groups_without_a_result_do_not_count() -> None:
    each = schedule(weights=[1.0, 0.0])
    prompts = each.take(2)
    failed = group(prompts[0], length=3)
    failed.samples, failed.failed = [], failed.samples
    ungraded = group(prompts[1], length=3)
    ungraded.samples[0].reward = None
    for found in (failed, ungraded):
        each.observe_dropped(found, rollout_id=0)
    each.observe([], rollout_id=0)
    assert each.state_dict()["stats"] == {}


def test_the_order_in_which_groups_are_dropped_has_no_effect() -> None:
    states = []
    for step in (1, -1):
        each = schedule(ScheduleName.longest_first)
        # Groups of one prompt: their mean depends on the order by rounding, the last length directly.
        found = [group(Cycle().take(1)[0], length=1 + i, reward=0.1 * (i + 1)) for i in range(5)]
        for index, dropped in enumerate(found):
            dropped.index = index
        for dropped in found[::step]:
            each.observe_dropped(dropped, rollout_id=0)
        each.observe([], rollout_id=0)
        states.append(each.state_dict())
    assert states[0] == states[1] and states[0]["stats"]["0"]["length"] == 5.0


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("weights", [None, [1.0, 0.3]])
def test_a_state_continues_exactly(name: ScheduleName, weights: list[float] | None) -> None:
    sources = Cycle(), Cycle()
    config = SamplingConfig(schedule=name, difficulty_weights=weights)
    first, second = (PromptSchedule(source, config, seed=3) for source in sources)
    observe_epoch(first)
    for prompt in first.take(7):
        first.observe_dropped(group(prompt, length=40, reward=1.0), rollout_id=1)
    sources[1].load_state_dict(sources[0].state_dict())
    state = json.loads(json.dumps(first.state_dict()))
    assert bool(state) == (name != ScheduleName.plain or weights is not None)
    if state:
        second.load_state_dict(state)
    for rollout_id in (1, 2):
        for each in (first, second):
            each.observe([], rollout_id=rollout_id)
        assert [first.take(5) for _ in range(8)] == [second.take(5) for _ in range(8)]


def test_a_state_without_dropped_groups_is_loaded() -> None:
    first, second = schedule(weights=[1.0, 0.3]), schedule(weights=[1.0, 0.3])
    observe_epoch(first)
    state = first.state_dict()
    del state["dropped"]
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
