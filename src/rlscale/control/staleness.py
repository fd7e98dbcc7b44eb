"""Staleness bound: no trained token is more than `rollout.max_staleness` weight updates old."""

import asyncio
from collections.abc import Sequence

import numpy as np

from rlscale.errors import StalenessError
from rlscale.types import Group, Sample, SampleStatus, TrainBatch, WeightVersion


class VersionGate:
    """Gate that blocks rollout r until weights of version r - max_staleness or newer are on the engines.

    Invariant: the version never decreases. The training loop is the only caller of `open`.

    Example:
        gate = VersionGate(0)
        await gate.wait_for(1)   # returns after another task has called gate.open(1)
    """

    def __init__(self, version: WeightVersion) -> None:
        self._version = version
        self._changed = asyncio.Condition()

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def wait_for(self, version: WeightVersion) -> WeightVersion:
        """Waits for `version` or a newer one, and returns the current version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)
            return self._version

    async def open(self, version: WeightVersion) -> None:
        assert version >= self._version, "the weight version must not decrease"
        async with self._changed:
            self._version = version
            self._changed.notify_all()


def reason_to_drop(group: Group, *, oldest: WeightVersion) -> str | None:
    """The reason why a group must not be trained on; None: it may be.

    Args:
        group: as an engine or a checkpoint returned it.
        oldest: version of the oldest weights whose tokens may be trained on.
    """
    for sample in group.samples:
        if sample.status == SampleStatus.aborted:
            return f"sample {sample.index} was aborted"
        # Fast path: without an old token it does not matter which tokens are trainable.
        if min(sample.weight_versions, default=oldest) >= oldest:
            continue
        version = oldest_version(sample)
        if version is not None and version < oldest:
            return f"sample {sample.index} has a token of weight version {version}, older than {oldest}"
    return None


def oldest_version(sample: Sample) -> WeightVersion | None:
    """The oldest weight version of a sample's trainable tokens; None: it has no trainable token."""
    pairs = zip(sample.weight_versions, sample.loss_mask, strict=True)
    return min((version for version, trainable in pairs if trainable), default=None)


def check_staleness(batch: TrainBatch, groups: Sequence[Group], *, max_staleness: int) -> dict[str, float]:
    """Checks the age of every trainable token just before training.

    Args:
        batch: made of `groups`; its version is that of the weights to be trained.
        groups: name the sample in the error.
        max_staleness: largest age of a token, in weight updates.

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
        # offsets[i] <= token < offsets[i + 1] holds for the sample i of a token.
        sample = samples[int(np.searchsorted(batch.offsets, wrong[0], side="right")) - 1]
        raise StalenessError(
            f"sample {sample.index} of group {sample.group_index} must be made by weight versions "
            f"{batch.version - max_staleness} to {batch.version} (rollout.max_staleness={max_staleness}), "
            f"got a token of version {batch.weight_versions[wrong[0]]}"
        )
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
