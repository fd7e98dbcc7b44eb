"""Builds the columns of a training batch from finished groups."""

from collections.abc import Sequence
from dataclasses import replace
from struct import pack
from typing import Any

import numpy as np

from rlscale.data.column_buffers import ColumnBuffers
from rlscale.expert_routes import RouteIds
from rlscale.images import Image
from rlscale.teacher_scores import TeacherScores
from rlscale.types import (
    REWARD_WEIGHTS,
    REWARDS,
    Float32,
    Group,
    Int32,
    Sample,
    SampleStatus,
    TrainBatch,
    UInt8,
    WeightVersion,
)

_TRAINABLE = (SampleStatus.completed, SampleStatus.truncated)


def build_batch(
    groups: Sequence[Group],
    version: WeightVersion,
    *,
    has_rewards: bool = True,
    mask_truncated: bool = False,
    buffers: ColumnBuffers | None = None,
) -> TrainBatch:
    """Packs the samples of `groups`, in order, into ragged columns.

    Args:
        groups: at least one sample; all are completed or truncated.
        has_rewards: every sample has a reward; false for supervised training: the rewards are 0.
        version: current version of the weights.
        mask_truncated: no token of a truncated sample is trainable (DAPO's overlong filter, arXiv:2503.14476); its
            reward still counts in its group.
        buffers: memory for the token columns; None: new memory.
    """
    samples = [sample for group in groups for sample in group.samples]
    assert samples, "a batch needs at least one sample"
    response_lens = [_checked_length(sample) for sample in samples]
    prompt_lens = np.asarray([sample.prompt_len for sample in samples], dtype=np.int32)
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum(prompt_lens + response_lens, out=offsets[1:])
    take = (buffers or ColumnBuffers()).take
    num_tokens = int(offsets[-1])
    tokens: Int32 = take("tokens", num_tokens, np.int32)
    np.concatenate(_token_parts(samples), out=tokens)
    # One pass over the columns: each value is copied once, from its sample to its place.
    mask: UInt8 = take("loss_mask", num_tokens, np.uint8)
    logprobs: Float32 = take("rollout_logprobs", num_tokens, np.float32)
    versions: Int32 = take("weight_versions", num_tokens, np.int32)
    starts, ends = (offsets[:-1] + prompt_lens).tolist(), offsets.tolist()
    for sample, begin, start, end in zip(samples, ends[:-1], starts, ends[1:], strict=True):
        mask[begin:start], logprobs[begin:start], versions[begin:start] = 0, 0, -1
        logprobs[start:end] = sample.rollout_logprobs
        versions[start:end] = sample.weight_versions
        is_masked = mask_truncated and sample.status == SampleStatus.truncated
        mask[start:end] = 0 if is_masked else sample.loss_mask
    return TrainBatch(
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        weight_versions=versions,
        offsets=offsets,
        prompt_lens=prompt_lens,
        rewards=np.asarray([_reward(s) if has_rewards else 0.0 for s in samples], dtype=np.float32),
        group_ids=np.asarray([group.index for group in groups for _ in group.samples], dtype=np.int64),
        trajectory_ids=np.asarray([s.index for s in samples], dtype=np.int64),
        version=version,
        routes=_routes(samples),
        teacher=_teacher(samples),
        images=_images(samples),
        **(_named_rewards(samples) if has_rewards else {}),
    )


def _token_parts(samples: Sequence[Sample]) -> list[Int32]:
    """Prompt and response of each sample, one after the other."""
    # The samples of a group have one prompt, whose tokens are Python numbers: `struct` converts them in half the time.
    prompts = {id(sample.prompt): sample.prompt.token_ids for sample in samples}
    columns = {key: np.frombuffer(pack(f"={len(ids)}i", *ids), np.int32) for key, ids in prompts.items()}
    return [part for sample in samples for part in (columns[id(sample.prompt)], sample.response_tokens)]


def _checked_length(sample: Sample) -> int:
    """Length of the response, which can be trained on."""
    assert sample.status in _TRAINABLE, f"sample {sample.index} is {sample.status} and cannot be trained on"
    length = len(sample.response_tokens)
    same = length == len(sample.loss_mask) == len(sample.rollout_logprobs) == len(sample.weight_versions)
    assert same, f"columns of sample {sample.index} differ in length"
    assert sample.routes is None or len(sample.routes) == sample.num_tokens, (
        f"routes of sample {sample.index} differ in length"
    )
    return length


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.index} has no reward"
    return sample.reward


def _named_rewards(samples: Sequence[Sample]) -> dict[str, Any]:
    """Rewards by name, and their weights; empty without `reward.weights`. [S, K], [K]"""
    weights: dict[str, float] | None = samples[0].metadata.get(REWARD_WEIGHTS)
    if weights is None:
        return {}
    for sample in samples:
        # Samples of other weights, of a buffer or a file, cannot be summed with these.
        found = sample.metadata.get(REWARD_WEIGHTS)
        assert found == weights, f"sample {sample.index} must have reward_weights {weights}, got {found}"
    return {
        "named_rewards": np.asarray([[s.metadata[REWARDS][name] for name in weights] for s in samples], np.float32),
        "reward_names": tuple(weights),
        "reward_weights": tuple(weights.values()),
    }


def _teacher(samples: Sequence[Sample]) -> TeacherScores | None:
    """Logprobs of teachers behind URLs, 0 at prompts; None: the run has none. [T, ...]"""
    first = samples[0].teacher
    if first is None:
        return None
    packed: dict[str, Any] = {}
    for name in first.columns():
        parts = []
        for sample in samples:
            # A zero in place of a missing logprob would be a wrong gradient: the rollout must have all of them.
            assert sample.teacher is not None, f"sample {sample.index} has no logprobs of the teacher"
            column = sample.teacher.columns()[name]
            assert len(column) == sample.response_len, f"teacher columns of sample {sample.index} differ in length"
            parts += [np.zeros((sample.prompt_len, *column.shape[1:]), column.dtype), column]
        packed[name] = np.concatenate(parts)
    return TeacherScores(**packed)


def _images(samples: Sequence[Sample]) -> tuple[tuple[Image, ...], ...]:
    """Images of each sample, as texts that ranks on every machine can read. Equal ones are one object. [S]"""
    if not any(sample.images for sample in samples):
        return ()
    # Samples of one group share their images: pickling the batch stores each object once.
    known: dict[str, Image] = {}
    for sample in samples:
        for image in sample.images:
            if image.digest not in known:
                known[image.digest] = replace(image, uri=image.data_url())
    return tuple(tuple(known[image.digest] for image in sample.images) for sample in samples)


def _routes(samples: Sequence[Sample]) -> RouteIds | None:
    """Routes of all samples, packed; unknown for samples without routes. None if no sample has routes. [T, ...]"""
    like = next((sample.routes for sample in samples if sample.routes is not None), None)
    if like is None:
        return None
    column = np.full((sum(s.num_tokens for s in samples), *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)
    start = 0
    for sample in samples:
        if sample.routes is not None:
            column[start : start + sample.num_tokens] = sample.routes
        start += sample.num_tokens
    return column
