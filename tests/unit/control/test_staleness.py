"""Staleness bound: the gate before generation, and the check before training."""

import asyncio

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
