"""Full weights under Hugging Face names, from the parts that all ranks hold.

    parts ─ transfer plan: from a rank that holds one to the rank that needs it ─ joined and renamed ─ full

No rank gets what it does not need: with one receiver all others only send, each part once; experts go from their owner
to the receiver and to nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.training.megatron.model import MegatronModel
from rlscale.training.megatron.names.bridge import BridgeExporter
from rlscale.training.megatron.names.cut import give
from rlscale.training.megatron.names.entry import Layout
from rlscale.training.megatron.names.tables import entries_of, figures_of_model, part_of_rank
from rlscale.training.megatron.transfer.carry import Post, carry
from rlscale.training.megatron.transfer.plan import TransferPlan, Wanted, owners, plan_transfer

BUCKET_BYTES = 2**28
"""Of the weights that a rank receives at once."""

Named = tuple[str, Tensor]


def export_hf(model: MegatronModel, *, is_spread: bool = False) -> Iterator[Named]:
    """Every weight in full under its published Hugging Face name, see `Exporter`; a collective."""
    return make_exporter(model, is_spread=is_spread).weights()


def make_exporter(model: MegatronModel, *, is_spread: bool = False) -> Exporter | BridgeExporter:
    """What gathers the weights of a model, by the maps that it is to be converted with; a collective."""
    return BridgeExporter(model) if model.by_bridge else Exporter(model, is_spread=is_spread)


class Exporter:
    """Gathers the weights of one model, as often as needed. Making it, which plans the transfer, is a collective.

    Args:
        model: whose weights are given.
        is_spread: each weight comes on one of the ranks that hold a part of it, so that all have something to do with
            them. Else all weights come on rank 0, layer by layer, and none on the others.
        bucket_bytes: most bytes that a rank receives at once, a larger weight aside.
        post: sends messages. None: the default process group.

    Example:
        exporter = Exporter(model)
        for name, tensor in exporter.weights():
            ...
    """

    def __init__(
        self,
        model: MegatronModel,
        *,
        is_spread: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        post: Post | None = None,
    ) -> None:
        self._weights = dict(model.named_weights())
        self._figures = figures_of_model(model.architecture)
        self._entries = list(entries_of(model.architecture))
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._post = post
        self.plan = self._make_plan(is_spread=is_spread, bucket_bytes=bucket_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all weights, with the rows that fill up the vocabulary."""
        return sum(weight.num_bytes for weight in self.plan.wanted)

    @torch.no_grad()
    def weights(self) -> Iterator[Named]:
        """The weights that this rank receives; a collective. A tensor is good until the next one is asked for.

        A tied output layer comes once, as the embedding. Raises WeightSyncError for one that does not arrive as it was
        sent.
        """
        parts = {name: weight.detach().contiguous() for name, weight in self._weights.items()}
        device = next(iter(parts.values())).device
        for arrived in carry(self.plan, parts, rank=dist.get_rank(), device=device, post=self._post):
            weight = self._entries[arrived.weight].weight
            shape, dtype = self._shapes[weight.megatron]
            tensors = give(
                weight.layout, [part.view(dtype).view(shape) for part in arrived.parts], figures=self._figures
            )
            for name, tensor in zip(weight.hf, tensors, strict=True):
                yield name, tensor.contiguous()

    def _make_plan(self, *, is_spread: bool, bucket_bytes: int) -> TransferPlan:
        own: dict[str, tuple[int, int, torch.Size, torch.dtype]] = {}
        for entry in self._entries:
            weight = self._weights.get(entry.weight.megatron)
            if weight is not None:
                # All ranks hold the only part of a weight that is not divided.
                part = part_of_rank(entry)
                index, count = (0, 1) if entry.weight.layout == Layout.whole else (part.index, part.count)
                own[entry.weight.megatron] = (index, count, weight.shape, weight.dtype)
        everywhere: list[dict[str, tuple[int, int, torch.Size, torch.dtype]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        known = {name: about for rank in everywhere for name, about in rank.items()}
        self._shapes = {name: (shape, dtype) for name, (_, _, shape, dtype) in known.items()}
        wanted = []
        for entry in self._entries:
            _, count, shape, dtype = known[entry.weight.megatron]
            size = prod(shape) * dtype.itemsize
            wanted.append(Wanted(name=entry.weight.megatron, num_parts=count, part_bytes=size))
        held = [{name: about[0] for name, about in rank.items()} for rank in everywhere]
        receivers = owners(wanted, held) if is_spread else [0] * len(wanted)
        return plan_transfer(wanted, held, receivers=receivers, bucket_bytes=bucket_bytes)
