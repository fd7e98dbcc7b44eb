"""Weights of earlier versions of the policy, which wait in host memory to score the tokens that they generated."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.training.fsdp.step import score
from rlscale.training.rollout import Rollout
from rlscale.types import WeightVersion

FOLDER = "old_policies"

log = logging.getLogger(__name__)

Shards = dict[str, Tensor]
"""This rank's shard of each trained parameter, by name. Frozen ones are the same in every version."""


class OldPolicies:
    """The last `limit` versions before the current one. They take turns inside of the policy's own model.

    Example:
        old = OldPolicies(limit=2)
        old.score(rollout, model, temperature=1.0)     # replaces `old` where an earlier version drew the token
        old.keep(model, version=batch.version)         # before the policy moves on
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._kept: dict[WeightVersion, Shards] = {}

    @torch.no_grad()
    def keep(self, model: nn.Module, *, version: WeightVersion) -> None:
        """Copies the weights that are `version`, and forgets the oldest ones there is no room for."""
        self._kept[version] = {name: _to_host(shard) for name, shard in _shards(model).items()}
        for old in sorted(self._kept)[: -self._limit]:
            del self._kept[old]

    @torch.no_grad()
    def score(self, rollout: Rollout, model: PreTrainedModel, *, temperature: float) -> None:
        """Fills the rows of `old` whose token an earlier version drew with its logprobs; a collective.

        A version that is not kept any more leaves the current policy's.
        """
        batch = rollout.batch
        assert rollout.old is not None, "the current policy's come first"
        drew = np.where(batch.loss_mask > 0, batch.weight_versions, batch.version)
        for version in sorted(set(np.unique(drew).tolist()) - {batch.version}):
            if version not in self._kept:
                log.warning("the weights of version %d are not kept; the current ones score its tokens", version)
                continue
            current = {name: shard.clone() for name, shard in _shards(model).items()}
            _write(model, self._kept[version])
            column = score(model, rollout.scored, num_tokens=len(batch.tokens), temperature=temperature)
            _write(model, current)
            rollout.old = torch.where(torch.from_numpy(drew == version), column, rollout.old)

    def save(self, folder: Path, model: nn.Module) -> None:
        """Writes them into a checkpoint; a collective."""
        for version in sorted(self._kept):
            place = folder / FOLDER / str(version)
            if dist.get_rank() == 0:
                place.mkdir(parents=True)
            dist.barrier()
            writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
            save(dict(_like(model, self._kept[version])), storage_writer=writer)

    @torch.no_grad()
    def load(self, folder: Path, model: nn.Module) -> None:
        """The inverse of `save`. A checkpoint without any leaves none."""
        self._kept = {}
        for place in sorted((folder / FOLDER).glob("*"), key=lambda path: int(path.name)):
            tensors = _like(model, {name: torch.empty_like(shard) for name, shard in _shards(model).items()})
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(place)))
            self._kept[int(place.name)] = {name: _to_host(_local(tensor)) for name, tensor in tensors.items()}


def _shards(model: nn.Module) -> Shards:
    return {name: _local(p.detach()) for name, p in model.named_parameters() if p.requires_grad}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_host(shard: Tensor) -> Tensor:
    copy = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
    return copy.copy_(shard)


def _write(model: nn.Module, shards: Shards) -> None:
    for name, shard in _shards(model).items():
        shard.copy_(shards[name])


def _like(model: nn.Module, shards: Shards) -> dict[str, Tensor]:
    """Shards as tensors that are spread over the ranks as the model's parameters are."""
    spread: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name not in shards:
            continue
        shard = shards[name].to(_local(parameter.detach()).device)
        if isinstance(parameter, DTensor):
            shard = DTensor.from_local(
                shard,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        spread[name] = shard
    return spread
