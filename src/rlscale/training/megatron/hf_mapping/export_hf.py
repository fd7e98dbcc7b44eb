"""Full weights under Hugging Face names, from the parts that all ranks hold.

    parts ─ transfer plan: from a rank that holds one to the rank that needs it ─ joined and renamed ─ full

No rank gets what it does not need: with one receiver all others only send, each part once; with several, experts stay
with their owners. Only where every rank wants all weights are they sent on from the first one to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.training.megatron.hf_mapping.bridge import BridgeExporter
from rlscale.training.megatron.hf_mapping.families import entries_of, figures_of_model, part_of_rank
from rlscale.training.megatron.hf_mapping.mapping import Layout
from rlscale.training.megatron.hf_mapping.sharding import give
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.megatron.transfer.exchange import P2P, ReceivedWeight, exchange
from rlscale.training.megatron.transfer.transfer_plan import (
    TransferPlan,
    WeightSpec,
    balanced_owners,
    fewest_owners,
    plan_transfer,
)
from rlscale.training.spec import WeightOwners

BUCKET_BYTES = 2**28
"""Of the weights that a rank receives at once."""

Named = tuple[str, Tensor]
_CHOICES = {WeightOwners.owners: fewest_owners, WeightOwners.holders: balanced_owners}


def export_hf(model: MegatronModel, *, to: WeightOwners = WeightOwners.first) -> Iterator[Named]:
    """Every weight in full under its published Hugging Face name, see `Exporter`; a collective."""
    return make_exporter(model, to=to).weights()


def make_exporter(model: MegatronModel, *, to: WeightOwners = WeightOwners.first) -> Exporter | BridgeExporter:
    """What gathers the weights of a model, by the maps that it is to be converted with; a collective."""
    return BridgeExporter(model, to=to) if model.uses_bridge else Exporter(model, to=to)


class Exporter:
    """Gathers the weights of one model, as often as needed. Making it, which plans the transfer, is a collective.

    Args:
        model: whose weights are given.
        to: the ranks that weights come on, layer by layer.
        bucket_bytes: most bytes that a rank receives at once, a larger weight aside.
        p2p: sends messages. None: the default process group.

    Example:
        exporter = Exporter(model)
        for name, tensor in exporter.weights():
            ...
    """

    def __init__(
        self,
        model: MegatronModel,
        *,
        to: WeightOwners = WeightOwners.first,
        bucket_bytes: int = BUCKET_BYTES,
        p2p: P2P | None = None,
    ) -> None:
        self._weights = dict(model.named_weights())
        self._figures = figures_of_model(model.architecture)
        self._entries = list(entries_of(model.architecture))
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._p2p = p2p
        self._is_for_all = to == WeightOwners.every
        self.plan = self._make_plan(to=to, bucket_bytes=bucket_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all weights, with the rows that fill up the vocabulary."""
        return sum(weight.num_bytes for weight in self.plan.weights)

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that have all weights between them, each on one of them."""
        return self.plan.receivers

    @torch.no_grad()
    def weights(self) -> Iterator[Named]:
        """The weights that this rank receives; a collective. A tensor is good until the next one is asked for.

        A tied output layer comes once, as the embedding. Raises WeightSyncError for one that does not arrive as it was
        sent.
        """
        parts = {name: weight.detach().contiguous() for name, weight in self._weights.items()}
        device = next(iter(parts.values())).device
        if self._is_for_all:
            yield from self._on_all(parts, device)
            return
        for arrived in exchange(self.plan, parts, rank=dist.get_rank(), device=device, p2p=self._p2p):
            yield from self._joined(arrived)

    def _on_all(self, parts: Mapping[str, Tensor], device: torch.device) -> Iterator[Named]:
        """Bucket by bucket: first on rank 0, then from there on all. What went wrong is raised on all, too."""
        for buckets in self.plan.rounds():
            (bucket,), found, problem = buckets, deque[ReceivedWeight](), ""
            plan = replace(self.plan, buckets=buckets)
            try:
                found.extend(exchange(plan, parts, rank=dist.get_rank(), device=device, p2p=self._p2p))
            except WeightSyncError as error:
                problem = str(error)
            told = [problem]
            dist.broadcast_object_list(told, src=bucket.receiver)
            if told[0]:
                raise WeightSyncError(told[0])
            for i in bucket.weight_indices:
                weight = self.plan.weights[i]
                full = torch.empty((weight.num_shards, weight.shard_bytes), dtype=torch.uint8, device=device)
                if found:
                    torch.stack(list(found.popleft().shards), out=full)
                dist.broadcast(full, src=bucket.receiver)
                yield from self._joined(ReceivedWeight(weight_index=i, shards=list(full)))

    def _joined(self, arrived: ReceivedWeight) -> Iterator[Named]:
        """The tensors of Hugging Face that a weight is made of."""
        weight = self._entries[arrived.weight_index].weight
        shape, dtype = self._shapes[weight.megatron]
        tensors = give(weight.layout, [part.view(dtype).view(shape) for part in arrived.shards], figures=self._figures)
        for name, tensor in zip(weight.hf, tensors, strict=True):
            yield name, tensor.contiguous()

    def _make_plan(self, *, to: WeightOwners, bucket_bytes: int) -> TransferPlan:
        own: dict[str, tuple[int, int, torch.Size, torch.dtype]] = {}
        for entry in self._entries:
            weight = self._weights.get(entry.weight.megatron)
            if weight is not None:
                # All ranks hold the only part of a weight that is not divided.
                part = part_of_rank(entry)
                index, count = (0, 1) if entry.weight.layout == Layout.whole else (part.index, part.count)
                own[entry.weight.megatron] = (index, count, weight.shape, weight.dtype)
        by_rank: list[dict[str, tuple[int, int, torch.Size, torch.dtype]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
        known = {name: about for rank in by_rank for name, about in rank.items()}
        self._shapes = {name: (shape, dtype) for name, (_, _, shape, dtype) in known.items()}
        wanted = []
        for entry in self._entries:
            _, count, shape, dtype = known[entry.weight.megatron]
            size = prod(shape) * dtype.itemsize
            wanted.append(WeightSpec(name=entry.weight.megatron, num_shards=count, shard_bytes=size))
        held = [{name: about[0] for name, about in rank.items()} for rank in by_rank]
        receivers = _CHOICES[to](wanted, held) if to in _CHOICES else [0] * len(wanted)
        return plan_transfer(wanted, held, receivers=receivers, bucket_bytes=bucket_bytes)
