"""Copies of the policy's weights for `OldPolicies`: this rank's shards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.training.fsdp.step import score
from rlscale.training.rollout_state import Rollout

Shards = dict[str, Tensor]
"""This rank's shard of each trained parameter, by name. Frozen ones are the same in every version."""


class PolicyShards:
    """The `PolicyWeights` of a sharded model."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        self._model, self._temperature = model, temperature

    @torch.no_grad()
    def copy(self) -> Shards:
        return {name: _to_host(shard) for name, shard in _shards(self._model).items()}

    @torch.no_grad()
    def score(self, rollout: Rollout, weights: Shards) -> Tensor:
        model, num_tokens = self._model, len(rollout.batch.tokens)
        current = {name: shard.clone() for name, shard in _shards(model).items()}
        _write(model, weights)
        column = score(model, rollout.scored, num_tokens=num_tokens, temperature=self._temperature)
        _write(model, current)
        return column

    def write(self, weights: Shards, folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(_like(self._model, weights)), storage_writer=writer)

    @torch.no_grad()
    def read(self, folder: Path) -> Shards:
        model = self._model
        tensors = _like(model, {name: torch.empty_like(shard) for name, shard in _shards(model).items()})
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
        return {name: _to_host(_local(tensor)) for name, tensor in tensors.items()}


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
