"""Weights of earlier versions of the policy, which wait in host memory to score the tokens that they generated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.training.rollout_state import Rollout
from rlscale.types import WeightVersion

FOLDER = "old_policies"

log = logging.getLogger(__name__)

Weights = TypeVar("Weights")


class PolicyWeights(Protocol[Weights]):
    """How a backend copies the policy's weights and computes with such a copy. All but `copy` are collectives."""

    def copy(self) -> Weights:
        """Those of this rank, in the host's memory."""
        ...

    def score(self, rollout: Rollout, weights: Weights) -> Tensor:
        """Logprobs by those weights as a column of the batch. [tokens]"""
        ...

    def write(self, weights: Weights, folder: Path) -> None:
        """Saves them in an existing folder."""
        ...

    def read(self, folder: Path) -> Weights:
        """The inverse of `write`."""
        ...


class OldPolicies(Generic[Weights]):
    """The last `limit` versions before the current one. They take turns inside of the policy's own model.

    Example:
        old = OldPolicies(weights, limit=2)
        old.score(rollout)                      # replaces `old` where an earlier version drew the token
        old.keep(version=batch.version)         # before the policy moves on
    """

    def __init__(self, weights: PolicyWeights[Weights], *, limit: int) -> None:
        self._weights, self._limit = weights, limit
        self._kept: dict[WeightVersion, Weights] = {}

    def keep(self, *, version: WeightVersion) -> None:
        """Copies the weights that are `version`, and forgets the oldest ones there is no room for."""
        self._kept[version] = self._weights.copy()
        for old in sorted(self._kept)[: -self._limit]:
            del self._kept[old]

    def score(self, rollout: Rollout) -> None:
        """Fills the rows of `old` whose token an earlier version drew with its logprobs; a collective.

        A version that is not kept any more leaves the current policy's.
        """
        batch = rollout.batch
        assert rollout.old_logprobs is not None, "the current policy's come first"
        drew = np.where(batch.loss_mask > 0, batch.weight_versions, batch.version)
        for version in sorted(set(np.unique(drew).tolist()) - {batch.version}):
            if version not in self._kept:
                log.warning("the weights of version %d are not kept; the current ones score its tokens", version)
                continue
            column = self._weights.score(rollout, self._kept[version])
            rollout.old_logprobs = torch.where(torch.from_numpy(drew == version), column, rollout.old_logprobs)

    def save(self, folder: Path) -> None:
        """Writes them into a checkpoint; a collective."""
        for version in sorted(self._kept):
            place = folder / FOLDER / str(version)
            if dist.get_rank() == 0:
                place.mkdir(parents=True)
            dist.barrier()
            self._weights.write(self._kept[version], place)

    def load(self, folder: Path) -> None:
        """The inverse of `save`. A checkpoint without any leaves none."""
        places = sorted((folder / FOLDER).glob("*"), key=lambda path: int(path.name))
        self._kept = {int(place.name): self._weights.read(place) for place in places}
