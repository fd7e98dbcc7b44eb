"""Builds the columns of a training batch from finished groups."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from rlscale.types import Group, Int32, Int64, RouteIds, Sample, SampleStatus, TrainBatch, WeightVersion

_TRAINABLE = (SampleStatus.completed, SampleStatus.truncated)


def build_batch(
    groups: Sequence[Group], version: WeightVersion, *, has_rewards: bool = True, mask_truncated: bool = False
) -> TrainBatch:
    """Packs the samples of `groups`, in order, into ragged columns.

    Args:
        groups: at least one sample; all are completed or truncated.
        has_rewards: every sample has a reward; false for supervised training: the rewards are 0.
        version: current version of the weights.
        mask_truncated: no token of a truncated sample is trainable (DAPO's overlong filter, arXiv:2503.14476); its
            reward still counts in its group.
    """
    samples = [sample for group in groups for sample in group.samples]
    assert samples, "a batch needs at least one sample"
    for sample in samples:
        _check(sample)
    offsets = np.cumsum([0, *(len(s.tokens) for s in samples)], dtype=np.int64)
    prompt_lens = np.asarray([s.prompt_len for s in samples], dtype=np.int32)
    is_response = _is_response(offsets, prompt_lens=prompt_lens)
    return TrainBatch(
        tokens=np.fromiter(chain.from_iterable(s.tokens for s in samples), np.int32, count=offsets[-1]),
        loss_mask=_column(is_response, (_loss_mask(s, mask_truncated) for s in samples), np.uint8, fill=0),
        rollout_logprobs=_column(is_response, (s.rollout_logprobs for s in samples), np.float32, fill=0),
        weight_versions=_column(is_response, (s.weight_versions for s in samples), np.int32, fill=-1),
        offsets=offsets,
        prompt_lens=prompt_lens,
        rewards=np.asarray([_reward(s) if has_rewards else 0.0 for s in samples], dtype=np.float32),
        group_ids=np.asarray([group.index for group in groups for _ in group.samples], dtype=np.int64),
        trajectory_ids=np.asarray([s.index for s in samples], dtype=np.int64),
        version=version,
        routes=_routes(samples),
    )


def _check(sample: Sample) -> None:
    assert sample.status in _TRAINABLE, f"sample {sample.index} is {sample.status} and cannot be trained on"
    length = len(sample.tokens) - sample.prompt_len
    same = length == sample.response_len == len(sample.rollout_logprobs) == len(sample.weight_versions)
    assert same, f"columns of sample {sample.index} differ in length"
    assert sample.routes is None or len(sample.routes) == len(sample.tokens), (
        f"routes of sample {sample.index} differ in length"
    )


def _loss_mask(sample: Sample, mask_truncated: bool) -> Sequence[int]:
    if mask_truncated and sample.status == SampleStatus.truncated:
        return [0] * sample.response_len
    return sample.loss_mask


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.index} has no reward"
    return sample.reward


def _routes(samples: Sequence[Sample]) -> RouteIds | None:
    """Routes of all samples, packed; unknown for samples without routes. None if no sample has routes. [T, ...]"""
    like = next((sample.routes for sample in samples if sample.routes is not None), None)
    if like is None:
        return None
    column = np.full((sum(len(s.tokens) for s in samples), *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)
    start = 0
    for sample in samples:
        if sample.routes is not None:
            column[start : start + len(sample.tokens)] = sample.routes
        start += len(sample.tokens)
    return column


def _is_response(offsets: Int64, *, prompt_lens: Int32) -> npt.NDArray[np.bool_]:
    """True for response tokens. [T]"""
    # +1 at the start of each response and -1 at the end of its sample: the running sum is 1 within responses.
    steps = np.zeros(offsets[-1] + 1, dtype=np.int8)
    np.add.at(steps, offsets[:-1] + prompt_lens, 1)
    np.add.at(steps, offsets[1:], -1)
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)


def _column(
    is_response: npt.NDArray[np.bool_], responses: Iterable[Sequence[float]], dtype: npt.DTypeLike, *, fill: int
) -> npt.NDArray[Any]:
    """Builds a token column: `fill` at prompt tokens, the values of `responses` at response tokens. [T]"""
    column = np.full(len(is_response), fill, dtype=dtype)
    column[is_response] = np.fromiter(chain.from_iterable(responses), dtype)
    return column
