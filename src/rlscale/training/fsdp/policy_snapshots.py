"""Copies of the policy's weights on FSDP2 for `PolicySnapshots`: the shards of this rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.training.optim.muon import local_shard
from rlscale.training.rollout_state import PackedRollout

Shards = dict[str, Tensor]
"""This rank's shard of each trained parameter, by name. Frozen ones are the same in every version."""


class ShardSnapshots:
    """Copies of the shards of a model; see `SnapshotSource`.

    Args:
        model: the policy's.
        score: its logprobs with the current weights of the model.
    """

    def __init__(self, model: PreTrainedModel, *, score: Callable[[PackedRollout], Tensor]) -> None:
        self._model, self._score = model, score

    @torch.no_grad()
    def copy(self) -> Shards:
        return {name: _to_host(shard) for name, shard in _shards(self._model).items()}

    @torch.no_grad()
    def score(self, rollout: PackedRollout, weights: Shards) -> Tensor:
        # In the policy's own model, whose current weights wait in a copy on the device.
        current = {name: shard.clone() for name, shard in _shards(self._model).items()}
        _write(self._model, weights)
        column = self._score(rollout)
        _write(self._model, current)
        return column

    def write(self, weights: Shards, folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(_spread(self._model, weights)), storage_writer=writer)

    @torch.no_grad()
    def read(self, folder: Path) -> Shards:
        model = self._model
        tensors = _spread(model, {name: torch.empty_like(shard) for name, shard in _shards(model).items()})
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
        return {name: _to_host(local_shard(tensor)) for name, tensor in tensors.items()}


def _shards(model: nn.Module) -> Shards:
    return {name: local_shard(p.detach()) for name, p in model.named_parameters() if p.requires_grad}


def _to_host(shard: Tensor) -> Tensor:
    # Pinned, so that copies from and to the GPU are fast.
    copy = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
    return copy.copy_(shard)


def _write(model: nn.Module, shards: Shards) -> None:
    for name, shard in _shards(model).items():
        shard.copy_(shards[name])


def _spread(model: nn.Module, shards: Shards) -> dict[str, Tensor]:
    """Shards as distributed tensors, with the placement of the model's parameters; needs no communication."""
    spread: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name not in shards:
            continue
        shard = shards[name].to(local_shard(parameter.detach()).device)
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
