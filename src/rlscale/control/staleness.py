"""The staleness bound: no trained token is more than `rollout.max_staleness` weight updates old."""

from collections.abc import Sequence

import numpy as np

from rlscale.errors import StalenessError
from rlscale.types import Group, Sample, SampleStatus, TrainBatch, WeightVersion


def unusable(group: Group, *, oldest: WeightVersion) -> str | None:
    """Why a group may not be trained on; None if it may.

    Args:
        group: as it came from an engine or a checkpoint.
        oldest: of the weights whose tokens may be trained on.
    """
    for sample in group.samples:
        if sample.status == SampleStatus.aborted:
            return f"sample {sample.index} was aborted"
        if min(sample.weight_versions, default=oldest) >= oldest:
            continue  # what is not trainable need not be told apart
        version = oldest_version(sample)
        if version is not None and version < oldest:
            return f"sample {sample.index} has a token of weight version {version}, older than {oldest}"
    return None


def oldest_version(sample: Sample) -> WeightVersion | None:
    """Of the weights that made its trainable tokens; None where there are none."""
    pairs = zip(sample.weight_versions, sample.loss_mask, strict=True)
    return min((version for version, trainable in pairs if trainable), default=None)


def check_bound(batch: TrainBatch, groups: Sequence[Group], *, max_staleness: int) -> dict[str, float]:
    """The last look before training, at every trainable token.

    Args:
        batch: made of `groups`; its version is that of the weights to be trained.
        groups: to name the sample at fault.
        max_staleness: updates by which a token may be older.

    Returns:
        `staleness/mean` and `staleness/max`, in updates, over the trainable tokens.

    Raises:
        StalenessError: a token is older, or from weights that do not exist yet; the message names its sample.
    """
    trainable = np.flatnonzero(batch.loss_mask)
    if not len(trainable):
        return {}
    ages = batch.version - batch.weight_versions[trainable]
    wrong = trainable[(ages > max_staleness) | (ages < 0)]
    if len(wrong):
        samples = [sample for group in groups for sample in group.samples]
        sample = samples[int(np.searchsorted(batch.offsets, wrong[0], side="right")) - 1]
        raise StalenessError(
            f"sample {sample.index} of group {sample.group_index} must be made by weight versions "
            f"{batch.version - max_staleness} to {batch.version} (rollout.max_staleness={max_staleness}), "
            f"got a token of version {batch.weight_versions[wrong[0]]}"
        )
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
