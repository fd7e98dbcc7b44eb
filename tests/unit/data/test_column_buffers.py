"""Memory of batches that is used again."""

import numpy as np
import torch

from rlscale.data.batch import build_batch
from rlscale.data.column_buffers import ColumnBuffers
from rlscale.types import Group, Prompt, Sample, SampleStatus

PROMPT = Prompt(index=0, text="a", token_ids=(1, 2))


def make_group(*lengths: int, token: int) -> Group:
    samples = []
    for index, length in enumerate(lengths):
        sample = Sample(index=index, group_index=0, prompt=PROMPT, seed=0, status=SampleStatus.completed, reward=0.0)
        sample.append([token] * length, logprobs=[-1.0] * length, weight_versions=[4] * length)
        samples.append(sample)
    samples[-1].status = SampleStatus.truncated
    return Group(index=0, prompt=PROMPT, samples=samples)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    buffers = ColumnBuffers()
    first = buffers.take("tokens", 100, np.int32)
    where = address(first)
    del first
    again = buffers.take("tokens", 60, np.int32)
    assert address(again) == where and (len(again), again.dtype) == (60, np.int32)
    assert address(buffers.take("loss_mask", 60, np.uint8)) != where


def test_memory_that_anything_refers_to_is_left_alone() -> None:
    for hold in (lambda x: x, lambda x: x[3:5], lambda x: torch.from_numpy(x)[3:5], memoryview):
        buffers = ColumnBuffers()
        array = buffers.take("tokens", 100, np.int32)
        array[:] = 7
        held = hold(array)
        del array
        buffers.take("tokens", 100, np.int32)[:] = 8
        assert set(np.asarray(held).tolist()) == {7}


def test_a_larger_batch_gets_larger_memory() -> None:
    buffers = ColumnBuffers()
    assert len(buffers.take("tokens", 10, np.int32)) == 10
    assert len(buffers.take("tokens", 1000, np.int32)) == 1000


def test_a_batch_in_used_memory_equals_one_in_new_memory() -> None:
    buffers = ColumnBuffers()
    build_batch([make_group(9, 9, 30, token=5)], 4, buffers=buffers)
    for masked in (False, True):
        group = make_group(3, 1, 7, token=6)
        again = build_batch([group], 4, buffers=buffers, mask_truncated=masked)
        new = build_batch([group], 4, mask_truncated=masked)
        for name in ("tokens", "loss_mask", "rollout_logprobs", "weight_versions"):
            assert getattr(again, name).tolist() == getattr(new, name).tolist()
        assert again.weight_versions[:2].tolist() == [-1, -1] and again.loss_mask[:2].tolist() == [0, 0]
        assert bool(again.loss_mask[-7:].any()) is not masked
        del again
