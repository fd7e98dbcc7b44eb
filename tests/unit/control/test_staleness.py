"""Staleness bound: the gate before generation, and the check before training."""

import asyncio

import numpy as np
import pytest

from rlscale.control.staleness import VersionGate, check_staleness
from rlscale.data.batch import build_batch
from rlscale.errors import StalenessError
from rlscale.types import Group, Prompt, Sample, SampleStatus


async def test_waits_for_the_version() -> None:
    gate = VersionGate(0)
    waiter = asyncio.create_task(gate.wait_for(2))
    await gate.open(1)
    await asyncio.sleep(0)
    assert not waiter.done()
    await gate.open(3)
    assert await waiter == 3


async def test_an_older_version_does_not_wait() -> None:
    assert await VersionGate(4).wait_for(2) == 4


async def test_versions_never_decrease() -> None:
    with pytest.raises(AssertionError, match="must not decrease"):
        await VersionGate(4).open(3)


@pytest.mark.parametrize(
    ("versions", "mask", "accepted"),
    [([3, 5], [1, 1], True), ([2, 5], [1, 1], False), ([2, 5], [0, 1], True), ([3, 6], [1, 1], False)],
)
def test_the_check_before_training_names_the_sample(versions: list[int], mask: list[int], accepted: bool) -> None:
    prompt = Prompt(index=0, text="a", token_ids=(1,))
    samples = []
    for index, own in ((40, [5, 5]), (41, versions)):
        sample = Sample(index=index, group_index=20, prompt=prompt, seed=0, status=SampleStatus.completed, reward=0.0)
        sample.append([2, 3], logprobs=[-1.0, -1.0], weight_versions=own)
        samples.append(sample)
    samples[1].loss_mask = mask
    groups = [Group(index=20, prompt=prompt, samples=samples)]
    batch = build_batch(groups, 5)
    if accepted:
        assert check_staleness(batch, groups, max_staleness=2)["staleness/max"] <= 2
    else:
        with pytest.raises(StalenessError, match=r"sample 41 of group 20 must be made by weight versions 3 to 5"):
            check_staleness(batch, groups, max_staleness=2)


def test_ages_are_those_of_all_trainable_tokens() -> None:
    random, prompt = np.random.default_rng(0), Prompt(index=0, text="a", token_ids=(1, 2))
    samples = []
    for index, length in enumerate((3, 20, 1, 9)):
        sample = Sample(index=index, group_index=0, prompt=prompt, seed=0, status=SampleStatus.completed, reward=0.0)
        sample.append([3] * length, logprobs=[-1.0] * length, weight_versions=random.integers(4, 9, size=length))
        sample.loss_mask = random.integers(2, size=length, dtype=np.uint8)
        if index == 3:  # as a trajectory stores them if all are equal
            sample.weight_versions = np.broadcast_to(np.int32(7), length)
        samples.append(sample)
    groups = [Group(index=0, prompt=prompt, samples=samples)]
    ages = 8 - np.concatenate([each.weight_versions[each.loss_mask > 0] for each in samples])
    expected = {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
    assert check_staleness(build_batch(groups, 8), groups, max_staleness=4) == expected


def test_a_batch_without_trainable_tokens_has_no_age() -> None:
    prompt = Prompt(index=0, text="a", token_ids=(1,))
    sample = Sample(index=0, group_index=0, prompt=prompt, seed=0, status=SampleStatus.completed, reward=0.0)
    sample.append([2], logprobs=[0.0], weight_versions=[0], trainable=False)
    groups = [Group(index=0, prompt=prompt, samples=[sample])]
    assert check_staleness(build_batch(groups, 9), groups, max_staleness=0) == {}
