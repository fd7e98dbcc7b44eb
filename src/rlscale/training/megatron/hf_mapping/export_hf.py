"""Full weights under Hugging Face names, from the shards of all ranks.

    shards ─ transfer plan: from a rank that holds one to the rank that needs it ─ joined and renamed ─ full

No rank receives a weight that it does not need: with one receiver all other ranks only send, each shard once; with
several receivers experts stay with their owners. Only if every rank needs all weights are they broadcast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.architectures.weight_names import TensorLayout
from rlscale.errors import WeightSyncError
from rlscale.training.megatron.hf_mapping.adapter_mapping import ModelShards
from rlscale.training.megatron.hf_mapping.bridge import BridgeExporter
from rlscale.training.megatron.hf_mapping.mapping import (
    MappedWeight,
    head_sizes,
    map_weights,
    shard_of_rank,
    stack_experts,
)
from rlscale.training.megatron.hf_mapping.sharding import hf_from_shards
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.spec import WeightOwners
from rlscale.training.transfer.exchange import P2P, ReceivedWeight, exchange
from rlscale.training.transfer.transfer_plan import (
    TransferPlan,
    WeightSpec,
    balanced_owners,
    fewest_owners,
    plan_transfer,
)

BUCKET_BYTES = 2**28
"""Size of the buckets in which a rank receives weights."""

Named = tuple[str, Tensor]
_ShardInfo = tuple[int, int, torch.Size, torch.dtype]  # index, count, shape and dtype of a shard
_CHOICES = {WeightOwners.owners: fewest_owners, WeightOwners.holders: balanced_owners}


def export_hf(model: MegatronModel, *, to: WeightOwners = WeightOwners.first) -> Iterator[Named]:
    """Every weight in full under its published Hugging Face name, see `Exporter`; a collective."""
    return make_exporter(model, to=to).weights()


def make_exporter(model: MegatronModel, *, to: WeightOwners = WeightOwners.first) -> Exporter | BridgeExporter:
    """The exporter of a model's converter, `raw` or `bridge`; a collective."""
    return BridgeExporter(model, to=to) if model.uses_bridge else Exporter(model, to=to)


class Exporter:
    """Gathers the weights of one model, as often as needed. The constructor plans the transfer and is a collective.

    Args:
        model: model to export.
        to: ranks that receive weights, layer by layer.
        bucket_bytes: limit of a rank's receive buffer; a single larger weight may exceed it.
        p2p: sends messages. None: the default process group.
        mapped: parameters to export. None: all weights.

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
        mapped: Sequence[MappedWeight] | None = None,
    ) -> None:
        self._model = model
        self._sizes = head_sizes(model.architecture)
        self._mapped = list(stack_experts(map_weights(model.architecture)) if mapped is None else mapped)
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._p2p = p2p
        self._is_for_all = to == WeightOwners.every
        self.plan = self._make_plan(to=to, bucket_bytes=bucket_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, including the padding of the vocabulary."""
        return sum(weight.num_bytes for weight in self.plan.weights)

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that receive weights here and pass them on. Each weight is on exactly one of them."""
        return self.plan.receivers

    @torch.no_grad()
    def weights(self) -> Iterator[Named]:
        """The weights that this rank receives; a collective. A tensor is valid until the next one is requested.

        A tied output layer is yielded once, as the embedding. Adapters are merged into their weights.

        Raises:
            WeightSyncError: a weight arrives with another checksum than it was sent with.
        """
        yield from self._gathered(self._shards())

    @torch.no_grad()
    def base_weights(self) -> Iterator[Named]:
        """Like `weights`, without the adapters."""
        yield from self._gathered(self._shards(is_merged=False))

    def _shards(self, *, is_merged: bool = True) -> ModelShards:
        return ModelShards(self._model, is_merged=is_merged, mapped=self._mapped)

    def _gathered(self, shards: Mapping[str, Tensor]) -> Iterator[Named]:
        device = next(iter(shards.values())).device
        if self._is_for_all:
            yield from self._broadcast(shards, device)
            return
        for arrived in exchange(self.plan, shards, rank=dist.get_rank(), device=device, p2p=self._p2p):
            yield from self._joined(arrived)

    def _broadcast(self, shards: Mapping[str, Tensor], device: torch.device) -> Iterator[Named]:
        """Gathers bucket by bucket on one rank and broadcasts from there. An error is raised on all ranks."""
        for buckets in self.plan.rounds():
            (bucket,), found, problem = buckets, deque[ReceivedWeight](), ""
            plan = replace(self.plan, buckets=buckets)
            try:
                found.extend(exchange(plan, shards, rank=dist.get_rank(), device=device, p2p=self._p2p))
            except WeightSyncError as error:
                problem = str(error)
            # All ranks learn of an error before the broadcast, which would hang without the receiver.
            problems = [problem]
            dist.broadcast_object_list(problems, src=bucket.receiver)
            if problems[0]:
                raise WeightSyncError(problems[0])
            for i in bucket.weight_indices:
                weight = self.plan.weights[i]
                full = torch.empty((weight.num_shards, weight.shard_bytes), dtype=torch.uint8, device=device)
                if found:
                    torch.stack(list(found.popleft().shards), out=full)
                dist.broadcast(full, src=bucket.receiver)
                yield from self._joined(ReceivedWeight(weight_index=i, shards=list(full)))

    def _joined(self, arrived: ReceivedWeight) -> Iterator[Named]:
        """The Hugging Face tensors of a weight, from its shards as bytes."""
        weight = self._mapped[arrived.weight_index].weight
        shape, dtype = self._shapes[weight.megatron]
        shards = [part.view(dtype).view(shape) for part in arrived.shards]
        for name, tensor in zip(weight.hf, hf_from_shards(weight.layout, shards, sizes=self._sizes), strict=True):
            yield name, tensor.contiguous()

    def _make_plan(self, *, to: WeightOwners, bucket_bytes: int) -> TransferPlan:
        """The transfer plan from the shards of all ranks; a collective."""
        gathered: list[dict[str, _ShardInfo]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, self._own_shards())
        known = {name: info for rank in gathered for name, info in rank.items()}
        self._shapes = {name: (shape, dtype) for name, (_, _, shape, dtype) in known.items()}
        wanted = []
        for mapped in self._mapped:
            _, count, shape, dtype = known[mapped.weight.megatron]
            size = prod(shape) * dtype.itemsize
            wanted.append(WeightSpec(name=mapped.weight.megatron, num_shards=count, shard_bytes=size))
        held = [{name: info[0] for name, info in rank.items()} for rank in gathered]
        receivers = _CHOICES[to](wanted, held) if to in _CHOICES else [0] * len(wanted)
        return plan_transfer(wanted, held, receivers=receivers, bucket_bytes=bucket_bytes)

    def _own_shards(self) -> dict[str, _ShardInfo]:
        own: dict[str, _ShardInfo] = {}
        weights = self._shards(is_merged=False)
        for mapped in self._mapped:
            tensor = weights.get(mapped.weight.megatron)
            if tensor is not None:
                shard, is_whole = shard_of_rank(mapped), mapped.weight.layout == TensorLayout.whole
                # A replicated weight has one part, which every rank holds.
                index, count = (0, 1) if is_whole else (shard.index, shard.count)
                own[mapped.weight.megatron] = (index, count, tensor.shape, tensor.dtype)
        return own
