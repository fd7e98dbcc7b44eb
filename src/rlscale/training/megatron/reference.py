"""The reference model: weights in the host's memory that take the place of the policy's for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """Weights of another model with the policy's shapes, of this rank's part.

    Invariant: outside of `in_place_of` the chunks hold their own weights.

    Example:
        reference = ReferenceWeights(chunks)      # while the chunks hold the reference's weights
        with reference.in_place_of(chunks): ...   # later
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        pinned = torch.cuda.is_available()
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in _tensors(chunks)]
        if pinned:
            self._copies = [copy.pin_memory() for copy in self._copies]

    @contextmanager
    def in_place_of(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Has the chunks compute with these weights. Gradients must not be asked for meanwhile."""
        tensors = _tensors(chunks)
        own = [tensor.data for tensor in tensors]
        for tensor, copy in zip(tensors, self._copies, strict=True):
            # Their storage is left alone: it is a part of the buffers that the optimiser writes to.
            tensor.data = copy.to(tensor.device, non_blocking=True)
        try:
            yield
        finally:
            for tensor, data in zip(tensors, own, strict=True):
                tensor.data = data


def _tensors(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
