"""Weights in the host's memory that take the place of a model's own for a while, as of a reference or a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class HostWeights:
    """Weights of another model with the policy's shapes, of this rank's part.

    Invariant: outside of `in_place_of` the chunks hold their own weights.

    Example:
        reference = HostWeights(chunks)           # while the chunks hold the reference's weights
        with reference.in_place_of(chunks): ...   # later
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.tensors = [_to_host(tensor) for tensor in _tensors(chunks)]

    def take(self, chunks: Sequence[nn.Module]) -> None:
        """Becomes a copy of what the chunks hold now."""
        for tensor, copy in zip(_tensors(chunks), self.tensors, strict=True):
            copy.copy_(tensor.detach())

    @contextmanager
    def in_place_of(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Has the chunks compute with these weights. Gradients must not be asked for meanwhile."""
        tensors = _tensors(chunks)
        own = [tensor.data for tensor in tensors]
        for tensor, copy in zip(tensors, self.tensors, strict=True):
            # Their storage is left alone: it is a part of the buffers that the optimiser writes to. A copy on any
            # device, as what is loaded meanwhile must not change these.
            tensor.data = copy.to(tensor.device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            for tensor, data in zip(tensors, own, strict=True):
                tensor.data = data


def _to_host(tensor: Tensor) -> Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    return copy.pin_memory() if torch.cuda.is_available() else copy


def _tensors(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
