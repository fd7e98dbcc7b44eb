from dataclasses import replace

import numpy as np
import pytest

from rlscale.data.batch import build_batch
from rlscale.types import Group, Prompt, Sample, SampleStatus


def sample(index: int, prompt: Prompt, response: list[int], *, reward: float | None = 1.0) -> Sample:
    made = Sample(index=index, group_index=index // 2, prompt=prompt, seed=0, reward=reward)
    made.append(response, logprobs=[-0.5] * len(response), weight_versions=[3] * len(response))
    made.status = SampleStatus.completed
    return made


def test_columns() -> None:
    short, long = Prompt(index=0, text="a", token_ids=(7,)), Prompt(index=1, text="bc", token_ids=(8, 9))
    with_tool = sample(1, short, [1, 2], reward=0.25)
    with_tool.append([4], logprobs=[0.0], weight_versions=[3], trainable=False)
    groups = [
        Group(index=10, prompt=short, samples=[sample(0, short, [5]), with_tool]),
        Group(index=11, prompt=long, samples=[sample(2, long, [])]),
    ]
    batch = build_batch(groups, version=4)
    assert batch.tokens.tolist() == [7, 5, 7, 1, 2, 4, 8, 9]
    assert batch.loss_mask.tolist() == [0, 1, 0, 1, 1, 0, 0, 0]
    assert batch.rollout_logprobs.tolist() == [0, -0.5, 0, -0.5, -0.5, 0, 0, 0]
    assert batch.weight_versions.tolist() == [-1, 3, -1, 3, 3, 3, -1, -1]
    assert batch.offsets.tolist() == [0, 2, 6, 8]
    assert batch.num_trainable.tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="read-only"):  # the counts would be those of the mask before
        batch.loss_mask[:] = 0
    changed = replace(batch, loss_mask=np.ones_like(batch.loss_mask))
    assert changed.num_trainable.tolist() == np.diff(batch.offsets).tolist()
    assert batch.prompt_lens.tolist() == [1, 1, 2]
    assert batch.rewards.tolist() == [1.0, 0.25, 1.0]
    assert batch.group_ids.tolist() == [10, 10, 11]
    assert batch.trajectory_ids.tolist() == [0, 1, 2]
    assert batch.version == 4


def test_routes_are_packed_and_unknown_for_samples_without_them() -> None:
    prompt = Prompt(index=0, text="a", token_ids=(7, 8))
    routed, other = sample(0, prompt, [5]), sample(1, prompt, [1, 2])
    routed.append([6], logprobs=[0.0], weight_versions=[3], routes=np.arange(6, dtype=np.uint8).reshape(3, 1, 2))
    batch = build_batch([Group(index=0, prompt=prompt, samples=[other, routed])], version=0)
    assert batch.routes is not None and batch.routes.dtype == np.uint8
    assert batch.routes[:, 0].tolist() == [[255, 255]] * 4 + [[0, 1], [2, 3], [4, 5], [255, 255]]
    assert build_batch([Group(index=0, prompt=prompt, samples=[other])], version=0).routes is None


def test_a_token_keeps_the_route_that_it_was_generated_with() -> None:
    made = Sample(index=0, group_index=0, prompt=Prompt(index=0, text="a", token_ids=(7, 8)), seed=0)
    first, second = np.full((3, 1, 2), 4, dtype=np.uint8), np.full((6, 1, 2), 9, dtype=np.uint8)
    made.append([5, 6], logprobs=[0.0] * 2, weight_versions=[1] * 2, routes=first)
    made.append([2], logprobs=[0.0], weight_versions=[1], trainable=False)
    assert made.routes is not None and made.routes[:, 0, 0].tolist() == [4, 4, 4, 255, 255]
    made.append([3, 3], logprobs=[0.0] * 2, weight_versions=[2] * 2, routes=second)
    assert made.routes[:, 0, 0].tolist() == [4, 4, 4, 9, 9, 9, 255]


def test_truncated_samples_can_be_masked() -> None:
    prompt = Prompt(index=0, text="a", token_ids=(7,))
    cut_off = sample(0, prompt, [1, 2], reward=0.5)
    cut_off.status = SampleStatus.truncated
    groups = [Group(index=0, prompt=prompt, samples=[cut_off, sample(1, prompt, [3])])]
    assert build_batch(groups, version=0).loss_mask.tolist() == [0, 1, 1, 0, 1]
    batch = build_batch(groups, version=0, mask_truncated=True)
    assert batch.loss_mask.tolist() == [0, 0, 0, 0, 1]
    assert batch.rewards.tolist() == [0.5, 1.0]  # it still counts in its group
    assert batch.rollout_logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]


def test_unfinished_and_unrewarded_samples_are_rejected() -> None:
    prompt = Prompt(index=0, text="a", token_ids=(7,))
    aborted = sample(0, prompt, [1])
    aborted.status = SampleStatus.aborted
    with pytest.raises(AssertionError, match="sample 0 is aborted"):
        build_batch([Group(index=0, prompt=prompt, samples=[aborted])], version=0)
    with pytest.raises(AssertionError, match="sample 3 has no reward"):
        build_batch([Group(index=0, prompt=prompt, samples=[sample(3, prompt, [1], reward=None)])], version=0)
