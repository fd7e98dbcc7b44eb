"""From finished groups to the columns that trainers read."""

from collections.abc import Sequence

import numpy as np

from rlscale.types import Group, Sample, SampleStatus, TrainBatch, WeightVersion

_TRAINABLE = (SampleStatus.completed, SampleStatus.truncated)


def build_batch(groups: Sequence[Group], version: WeightVersion, *, has_rewards: bool = True) -> TrainBatch:
    """The samples of `groups`, in order, as ragged columns.

    Args:
        groups: at least one sample; all are completed or truncated.
        has_rewards: every sample has a reward; false for supervised training, whose column of rewards is 0.
        version: weights that are current now, when the rollout goes to the trainer.
    """
    samples = [sample for group in groups for sample in group.samples]
    assert samples, "a batch needs at least one sample"
    for sample in samples:
        _check(sample)
    return TrainBatch(
        tokens=np.concatenate([np.asarray(s.tokens, dtype=np.int32) for s in samples]),
        loss_mask=np.concatenate([_column(s, s.loss_mask, np.uint8, fill=0) for s in samples]),
        rollout_logprobs=np.concatenate([_column(s, s.rollout_logprobs, np.float32, fill=0) for s in samples]),
        weight_versions=np.concatenate([_column(s, s.weight_versions, np.int32, fill=-1) for s in samples]),
        offsets=np.cumsum([0, *(len(s.tokens) for s in samples)], dtype=np.int64),
        prompt_lens=np.asarray([s.prompt_len for s in samples], dtype=np.int32),
        rewards=np.asarray([_reward(s) if has_rewards else 0.0 for s in samples], dtype=np.float32),
        group_ids=np.asarray([group.index for group in groups for _ in group.samples], dtype=np.int64),
        execution_ids=np.asarray([s.index for s in samples], dtype=np.int64),
        version=version,
    )


def _check(sample: Sample) -> None:
    assert sample.status in _TRAINABLE, f"sample {sample.index} is {sample.status} and cannot be trained on"
    assert len(sample.tokens) == sample.prompt_len + sample.response_len, f"columns of sample {sample.index} differ"


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.index} has no reward"
    return sample.reward


def _column(
    sample: Sample, values: Sequence[float], dtype: type[np.generic], *, fill: int
) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """A token column of one sample: `fill` on the prompt, then the response's values. [prompt_len + R]"""
    column = np.full(len(sample.tokens), fill, dtype=dtype)
    column[sample.prompt_len :] = values
    return column
