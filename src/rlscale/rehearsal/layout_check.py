"""Checks a layout without processes: process groups, places of actors, and the messages of a weight transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family
from rlscale.config import RunConfig, TrainBackendName
from rlscale.config.rules import uses_engines
from rlscale.driver.trainer_spec import weight_owners
from rlscale.errors import ConfigError, count_noun
from rlscale.plan.placement import build_layout, fill_nodes, order_bundles
from rlscale.rehearsal.cut_layout import LayoutSizes, read_sizes
from rlscale.rehearsal.rank_layout import held_shards, planned_weights, rank_groups, sharded_weights
from rlscale.rehearsal.tiny_family import StageShape
from rlscale.training.fsdp.export_plan import FullWeight, plan_export
from rlscale.training.spec import WeightOwners
from rlscale.training.transfer.transfer_plan import (
    TransferPlan,
    WeightSpec,
    fewest_owners,
    plan_transfer,
)

BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutReport:
    """Results of the check: one line for each topic, and what is wrong."""

    lines: tuple[str, ...]
    faults: tuple[str, ...]


def check_layout(config: RunConfig, a: Architecture) -> LayoutReport:
    """Checks the layout of a resolved config.

    Args:
        a: architecture of the model.
    """
    sizes = read_sizes(config)
    lines, faults = _check_groups(sizes)
    placed, misplaced = _check_places(config)
    lines, faults = lines + placed, faults + misplaced
    if uses_engines(config):
        is_megatron, to = config.train.backend == TrainBackendName.megatron, weight_owners(config)
        if is_megatron and not find_family(a.model_type).megatron:
            faults.append(f"Megatron-core does not train {a.model_type}")
        elif find_family(a.model_type).vision is not None:
            # The architecture is that of the decoder; shapes of a tower are known to transformers alone.
            lines.append("weight transfer: not planned for a model with a vision tower")
        elif is_megatron or to != WeightOwners.every:
            plan = plan_weight_sync(config, a, sizes)
            lines.append(_describe_transfer(plan, to=to))
            faults += check_transfer(plan, sizes)
    return LayoutReport(lines=tuple(lines), faults=tuple(faults))


def _check_groups(sizes: LayoutSizes) -> tuple[list[str], list[str]]:
    faults, all_ranks = [], list(range(sizes.ranks))
    groups = rank_groups(sizes)
    for name, found in groups.items():
        if sorted(rank for group in found for rank in group) != all_ranks:
            faults.append(f"the {name} groups must contain each of {sizes.ranks} ranks once")
    several = {name: found for name, found in groups.items() if len(found[0]) > 1}
    named = [f"{count_noun(len(found), f'{name} group')} of {len(found[0])}" for name, found in several.items()]
    lines = [": ".join([count_noun(sizes.ranks, "trainer rank"), *([", ".join(named)] if named else [])])]
    spanning = sum(1 for group in groups["tensor"] if group[0] // sizes.gpus != group[-1] // sizes.gpus)
    if spanning:
        lines.append(f"{spanning} tensor-parallel groups span two nodes, which is slow")
    return lines, faults


def _check_places(config: RunConfig) -> tuple[list[str], list[str]]:
    """Places of all bundles on equal, empty nodes; an engine process without all its GPUs on one node is a fault."""
    layout, size = build_layout(config), config.cluster.num_gpus_per_node
    places = fill_nodes(layout, gpus_per_node=size)
    num_nodes = max((node for node, _ in places), default=-1) + 1
    try:
        order_bundles(layout, [f"{node:05}" for node, _ in places])
    except ConfigError as error:
        return [], [str(problem) for problem in error.problems]
    processes = sum(map(layout.num_processes, range(layout.num_engines)))
    gpus, nodes = count_noun(layout.num_gpus, "GPU"), count_noun(num_nodes, "node")
    return [f"placement: {gpus} on {nodes} of {size}, {processes} engine process{'' if processes == 1 else 'es'}"], []


def plan_weight_sync(config: RunConfig, a: Architecture, sizes: LayoutSizes) -> TransferPlan:
    """The transfer plan of a weight sync, as the ranks would compute it together."""
    if config.train.backend == TrainBackendName.megatron:
        return _plan_megatron(config, a, sizes)
    weights = [
        FullWeight(name=name, rows=rows, row_bytes=columns * BYTES[config.train.dtype])
        for name, (rows, columns) in sharded_weights(a)
    ]
    limit = config.train.update_weight_buffer_size
    return plan_export(weights, num_ranks=sizes.ranks, to=weight_owners(config), bucket_bytes=limit)


def _plan_megatron(config: RunConfig, a: Architecture, sizes: LayoutSizes) -> TransferPlan:
    stages = StageShape.from_core_args(config.megatron.core_args).stages_of_layers(a.num_layers, sizes.pipeline)
    padded = config.model.padded_vocab_size or a.vocab_size
    weights = list(planned_weights(a, sizes, stages=stages))
    dtype_bytes = BYTES[config.train.dtype]
    table = a.vocab_size * a.hidden_size
    wanted = [
        WeightSpec(
            name=each.weight.megatron,
            num_shards=each.num_shards,
            # The embedding and the output layer are padded.
            shard_bytes=(padded * a.hidden_size if each.num_elements == table else each.num_elements)
            * dtype_bytes
            // each.num_shards,
        )
        for each in weights
    ]
    held = held_shards(sizes, weights, num_experts=a.num_experts)
    receivers = _receivers(wanted, held, to=weight_owners(config))
    return plan_transfer(wanted, held, receivers=receivers, bucket_bytes=config.train.update_weight_buffer_size)


def _receivers(wanted: Sequence[WeightSpec], held: list[dict[str, int]], *, to: WeightOwners) -> list[int]:
    return fewest_owners(wanted, held) if to == WeightOwners.owners else [0] * len(wanted)


def check_transfer(plan: TransferPlan, sizes: LayoutSizes) -> list[str]:
    """Faults of a plan: a weight that arrives never or twice, or without one of its shards."""
    arrivals = [0] * len(plan.weights)
    incomplete: set[int] = set()
    for bucket in plan.buckets:
        shards: dict[int, set[int]] = {}
        for buffer in bucket.buffers:
            for each in buffer.slices:
                shards.setdefault(each.weight_index, set()).add(each.shard_index)
        for index in bucket.weight_indices:
            arrivals[index] += 1
            if shards.get(index) != set(range(plan.weights[index].num_shards)):
                incomplete.add(index)
    wrong = [index for index, number in enumerate(arrivals) if number != 1]
    faults = [f"{plan.weights[i].name} must be sent once, got {arrivals[i]} times" for i in wrong[:3]]
    faults += [f"{plan.weights[i].name} must arrive with all its shards" for i in sorted(incomplete)[:3]]
    outside = [rank for rank in plan.receivers if rank >= sizes.ranks]
    return faults + [f"rank {rank} is not one of {sizes.ranks}" for rank in outside]


def _describe_transfer(plan: TransferPlan, *, to: WeightOwners) -> str:
    total = sum(each.num_bytes for each in plan.weights)
    moved = sum(message.num_bytes for bucket in plan.buckets for message in bucket.messages)
    senders = "every rank" if to == WeightOwners.every else f"{len(plan.receivers)} of the ranks"
    buckets = count_noun(len(plan.buckets), "bucket")
    return (
        f"weight transfer: {len(plan.weights)} weights, {total / 1e9:.1f} GB, in {buckets} from {senders} to the "
        f"engines; {moved / 1e9:.1f} GB between ranks before that"
    )
