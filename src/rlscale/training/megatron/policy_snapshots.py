"""Weights in host memory that can replace those of a model: earlier policies, a reference or a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights, save_weights
from rlscale.training.megatron.model.adapted_layers import find_layer_adapters
from rlscale.training.megatron.policy import MegatronPolicy
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.rollout_state import PackedRollout


class HostWeights:
    """The rank's part of the weights of a model with the policy's shapes, in host memory, without adapters.

    Invariant: outside of `loaded_into` the chunks hold their own weights.

    Example:
        reference = HostWeights(chunks)           # while the chunks hold the reference's weights
        with reference.loaded_into(chunks): ...   # later
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.tensors = [_copy_to_host(tensor) for tensor in _tensors(chunks)]

    def copy_from(self, chunks: Sequence[nn.Module]) -> None:
        """Copies the current weights of the chunks."""
        for tensor, copy in zip(_tensors(chunks), self.tensors, strict=True):
            copy.copy_(tensor.detach())

    @contextmanager
    def loaded_into(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Makes the chunks compute with these weights inside the context. Gradients are not supported there."""
        tensors = _tensors(chunks)
        own = [tensor.data for tensor in tensors]
        for tensor, copy in zip(tensors, self.tensors, strict=True):
            # `data` is replaced, not overwritten: the own storage is part of the buffers that the optimiser writes.
            # copy=True: weights that are loaded inside the context must not change these.
            tensor.data = copy.to(tensor.device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            for tensor, data in zip(tensors, own, strict=True):
                tensor.data = data


class HostSnapshots:
    """The `SnapshotSource` of the policy: host copies that are loaded into the policy's own chunks to score."""

    def __init__(self, policy: MegatronPolicy, *, rank: MegatronRank) -> None:
        self._policy, self._chunks, self._async_saver = policy, policy.model.chunks, rank.async_saver

    def copy(self) -> HostWeights:
        return HostWeights(self._chunks)

    def score(self, rollout: PackedRollout, weights: HostWeights) -> Tensor:
        with weights.loaded_into(self._chunks):
            return self._policy.compute_snapshot_logprobs(rollout)

    def write(self, weights: HostWeights, folder: Path) -> None:
        with weights.loaded_into(self._chunks):
            save_weights(folder, model=self._policy.model, async_saver=self._async_saver)

    def read(self, folder: Path) -> HostWeights:
        weights = HostWeights(self._chunks)
        with weights.loaded_into(self._chunks):
            load_weights(folder, model=self._policy.model)
            weights.copy_from(self._chunks)
        return weights


def _copy_to_host(tensor: Tensor) -> Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    return copy.pin_memory() if torch.cuda.is_available() else copy


def _tensors(chunks: Sequence[nn.Module]) -> list[Tensor]:
    # The policy gets its adapters after the host copies of other models; a rule excludes snapshots with adapters.
    adapters = {parameter for each in find_layer_adapters(chunks) for parameter in each.parameters()}
    tensors = (tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
    return [tensor for tensor in tensors if tensor not in adapters]
