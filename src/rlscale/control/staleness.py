"""Staleness bound: no trained token is more than `rollout.max_staleness` weight updates old."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from rlscale.errors import StalenessError
from rlscale.types import Group, TrainBatch, WeightVersion


class VersionGate:
    """Gate that blocks rollout r until the engines have the weights after r - max_staleness rollouts, or newer ones.

    Invariant: neither the version nor its sum with `num_unchanged` decreases. The training loop is the only caller of
    `open`.

    Args:
        version: of the weights on the engines.
        num_unchanged: rollouts that were trained on without a new version: they trained only the critic.

    Example:
        gate = VersionGate(0)
        await gate.wait_for(1)   # returns after another task has called gate.open(1)
    """

    def __init__(self, version: WeightVersion, *, num_unchanged: int = 0) -> None:
        self._version, self._num_unchanged = version, num_unchanged
        self._changed = asyncio.Condition()

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def wait_for(self, num_rollouts: int) -> WeightVersion:
        """Waits for the weights after `num_rollouts` rollouts, or newer ones, and returns their version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version + self._num_unchanged >= num_rollouts)
            return self._version

    async def open(self, version: WeightVersion, *, num_unchanged: int = 0) -> None:
        assert version >= self._version, "the weight version must not decrease"
        async with self._changed:
            self._version, self._num_unchanged = version, num_unchanged
            self._changed.notify_all()


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
    limits, num_tokens, total, oldest = (batch.version - max_staleness, batch.version), 0, 0, batch.version
    samples, ends = [sample for group in groups for sample in group.samples], batch.offsets[1:].tolist()
    for sample, number, end in zip(samples, batch.num_trainable.tolist(), ends, strict=True):
        if not number:
            continue
        versions = sample.weight_versions
        low = high = int(versions[0])
        # Usually all tokens of a sample are of one version, stored once: then they need not be read.
        if versions.strides != (0,):
            versions = versions[batch.loss_mask[end - len(versions) : end] != 0]
            low, high = int(versions.min()), int(versions.max())
        if low < limits[0] or high > limits[1]:
            _raise_wrong_age(batch, groups, max_staleness=max_staleness)
        oldest = min(oldest, low)
        num_tokens += number
        total += low * number if low == high else int(versions.sum(dtype=np.int64))
    if not num_tokens:
        return {}
    mean = (batch.version * num_tokens - total) / num_tokens
    return {"staleness/mean": mean, "staleness/max": float(batch.version - oldest)}


def _raise_wrong_age(batch: TrainBatch, groups: Sequence[Group], *, max_staleness: int) -> NoReturn:
    trainable = np.flatnonzero(batch.loss_mask)
    ages = batch.version - batch.weight_versions[trainable]
    wrong = trainable[(ages > max_staleness) | (ages < 0)]
    samples = [sample for group in groups for sample in group.samples]
    # offsets[i] <= token < offsets[i + 1] holds for the sample i of a token.
    sample = samples[int(np.searchsorted(batch.offsets, wrong[0], side="right")) - 1]
    raise StalenessError(
        f"sample {sample.index} of group {sample.group_index} must be made by weight versions "
        f"{batch.version - max_staleness} to {batch.version} (rollout.max_staleness={max_staleness}), "
        f"got a token of version {batch.weight_versions[wrong[0]]}"
    )
