"""Full weights under Hugging Face names, gathered from all ranks.

    rank's parts of some weights, flat ─ pipeline group: the stage that has them sends ─┬─ tensor group: gathered ─ full
                                                    experts: gathered in the expert group ┘

Every rank takes part in every collective, and gets the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlscale.training.megatron.model import MegatronModel
from rlscale.training.megatron.names.cut import give
from rlscale.training.megatron.names.tables import Entry, entries_of, figures_of_model

BUCKET_BYTES = 2**28
"""Of one rank's parts of the weights that are gathered at once."""

Named = tuple[str, Tensor]


def export_hf(model: MegatronModel, *, dtype: torch.dtype | None = None) -> Iterator[Named]:
    """Every weight in full under its published Hugging Face name, layer by layer; a collective on each item.

    A tied output layer comes once, as the embedding. The first call finds out where weights lie; an `Exporter` that is
    kept does so once.

    Args:
        model: whose parameters are those of the last step.
        dtype: of the tensors; None: that of the parameters.
    """
    return Exporter(model).weights(dtype=dtype)


class Exporter:
    """Gathers the weights of one model, as often as needed. Making it is a collective.

    Example:
        exporter = Exporter(model)
        for name, tensor in exporter.weights(dtype=torch.bfloat16):
            ...
    """

    def __init__(self, model: MegatronModel) -> None:
        self._parameters = dict(model.named_parameters())
        self._dtype: torch.dtype = model.config.params_dtype
        self._figures = figures_of_model(model.architecture)
        self._entries = list(entries_of(model.architecture))
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        stages: list[dict[str, tuple[int, ...]]] = [{} for _ in range(self._pipeline.size())]
        dist.all_gather_object(stages, shapes, group=self._pipeline)
        # The first stage that has a weight gives it: of a tied output layer that is the embedding.
        self._owners = {name: rank for rank in reversed(range(len(stages))) for name in stages[rank]}
        self._shapes = {name: shape for stage in stages for name, shape in stage.items()}

    @torch.no_grad()
    def weights(self, *, dtype: torch.dtype | None = None) -> Iterator[Named]:
        """Every weight in full, see `export_hf`. A tensor is good until the next one is asked for."""
        for (owner, layer), entries in groupby(self._entries, key=self._place):
            if layer is None:
                yield from self._plain(list(entries), owner=owner, dtype=dtype or self._dtype)
            else:
                yield from self._experts(list(entries), owner=owner, dtype=dtype or self._dtype)

    def _place(self, entry: Entry) -> tuple[int, int | None]:
        """The pipeline rank that has a weight, and of experts their layer: other ranks have other ones of it."""
        if entry.expert is None:
            return self._owners[entry.weight.megatron], None
        return self._owners[f"decoder.layers.{entry.layer}.mlp.router.weight"], entry.layer

    def _plain(self, entries: Sequence[Entry], *, owner: int, dtype: torch.dtype) -> Iterator[Named]:
        group = parallel_state.get_tensor_model_parallel_group()
        for some in _buckets(entries, size=lambda entry: self._num_bytes(entry, dtype)):
            flats = _gathered(self._own(some, owner=owner, dtype=dtype), group)
            yield from self._full(some, some, flats)

    def _experts(self, entries: Sequence[Entry], *, owner: int, dtype: torch.dtype) -> Iterator[Named]:
        """Of each rank of the expert group as many experts as fit in a bucket, one rank after the other."""
        tensor = parallel_state.get_expert_tensor_parallel_group()
        spread = parallel_state.get_expert_model_parallel_group()
        share = len(entries) // spread.size()
        by_rank = [entries[rank * share : (rank + 1) * share] for rank in range(spread.size())]
        own, done = by_rank[spread.rank()], 0
        for some in _buckets(own, size=lambda entry: self._num_bytes(entry, dtype)):
            flats = _gathered(self._own(some, owner=owner, dtype=dtype), tensor)
            for rank, both in enumerate(_gathered(torch.cat(flats), spread)):
                theirs = by_rank[rank][done : done + len(some)]
                yield from self._full(theirs, some, both.chunk(len(flats)))
            done += len(some)

    def _own(self, entries: Sequence[Entry], *, owner: int, dtype: torch.dtype) -> Tensor:
        """This rank's parts of some weights end to end, which `owner` sends to its pipeline group."""
        if self._pipeline.rank() == owner:
            parts = [self._parameters[entry.weight.megatron].detach().to(dtype).flatten() for entry in entries]
            flat = torch.cat(parts)
        else:
            number = sum(prod(self._shapes[entry.weight.megatron]) for entry in entries)
            flat = torch.empty(number, dtype=dtype, device=torch.cuda.current_device())
        if self._pipeline.size() > 1:
            dist.broadcast(flat, group=self._pipeline, group_src=owner)
        return flat

    def _full(self, entries: Sequence[Entry], alike: Sequence[Entry], flats: Sequence[Tensor]) -> Iterator[Named]:
        """Weights in full from all ranks' parts; `alike` are weights of this rank with the same shapes."""
        start = 0
        for entry, own in zip(entries, alike, strict=True):
            shape = self._shapes[own.weight.megatron]
            stop = start + prod(shape)
            parts = [flat[start:stop].view(shape) for flat in flats]
            tensors = give(entry.weight.layout, parts, figures=self._figures)
            for name, tensor in zip(entry.weight.hf, tensors, strict=True):
                yield name, tensor.contiguous()
            start = stop

    def _num_bytes(self, entry: Entry, dtype: torch.dtype) -> int:
        return prod(self._shapes[entry.weight.megatron]) * dtype.itemsize


def _gathered(flat: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """What all ranks of a group have, which is of one length."""
    if group.size() == 1:
        return [flat]
    flats = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(flats, flat, group=group)
    return flats


def _buckets(entries: Sequence[Entry], *, size: Callable[[Entry], int]) -> Iterator[list[Entry]]:
    """Neighbours that together stay below BUCKET_BYTES, if there is more than one."""
    some: list[Entry] = []
    total = 0
    for entry in entries:
        if some and total + size(entry) > BUCKET_BYTES:
            yield some
            some, total = [], 0
        some.append(entry)
        total += size(entry)
    if some:
        yield some
