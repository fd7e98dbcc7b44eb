"""Transfer plan of an export: which rank receives which full weight, from the shapes of the model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlscale.training.fsdp.shards import rows_per_rank
from rlscale.training.spec import WeightOwners
from rlscale.training.transfer.transfer_plan import TransferPlan, WeightSpec, plan_transfer

MAX_SENDERS = 8
"""Ranks that send to engines: each has a process group with each engine, whose buffers take memory on both sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullWeight:
    """Size of a weight. FSDP2 divides its rows among all ranks."""

    name: str
    rows: int  # 1 for a scalar
    row_bytes: int  # as it is sent
    is_sharded: bool = True  # False: every rank has all of it


def plan_export(weights: Sequence[FullWeight], *, num_ranks: int, to: WeightOwners, bucket_bytes: int) -> TransferPlan:
    """The plan; every rank computes the same.

    Args:
        weights: in the order of the model.
        to: ranks that get the weights; not `every`, which needs no plan.
        bucket_bytes: limit of what a rank receives at once. A single larger weight may exceed it.
    """
    specs = []
    for weight in weights:
        num_shards = num_ranks if weight.is_sharded else 1
        rows = rows_per_rank(weight.rows, num_shards)
        specs.append(WeightSpec(name=weight.name, num_shards=num_shards, shard_bytes=rows * weight.row_bytes))
    # What is not sharded is on every rank.
    held = [{each.name: rank if each.num_shards > 1 else 0 for each in specs} for rank in range(num_ranks)]
    receivers = _balance(specs, _receivers(to, num_ranks))
    return plan_transfer(specs, held, receivers=receivers, bucket_bytes=bucket_bytes)


def _receivers(to: WeightOwners, num_ranks: int) -> list[int]:
    """Ranks that get weights, at equal distances, so that those of several nodes are on all of them."""
    number = {WeightOwners.holders: num_ranks, WeightOwners.owners: min(num_ranks, MAX_SENDERS)}.get(to, 1)
    return [i * num_ranks // number for i in range(number)]


def _balance(weights: Sequence[WeightSpec], ranks: Sequence[int]) -> list[int]:
    """For each weight the rank that has got the fewest bytes so far."""
    assigned, chosen = dict.fromkeys(ranks, 0), []
    for weight in weights:
        rank = min(ranks, key=lambda each: (assigned[each], each))
        assigned[rank] += weight.num_bytes
        chosen.append(rank)
    return chosen
