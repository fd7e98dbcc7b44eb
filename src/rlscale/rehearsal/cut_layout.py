"""Sizes of a run that decide its number of processes, and their cut to what one machine runs.

    1. whole replicas     fewer nodes, fewer data-parallel copies of the model, fewer engines
    2. parallel sizes     only if one replica is still too large: context until it is 1, tensor until it is 2, expert

Pipeline stages are never cut: their number decides which layers, schedules and messages a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from rlscale.config import RunConfig, TrainBackendName
from rlscale.config.rules import has_critic_ranks, num_engines, server_groups, uses_engines
from rlscale.config.server_groups import ServerRole
from rlscale.errors import ConfigError, Problem

MAX_PROCESSES = 32
"""Trainer ranks and engine servers of a rehearsal: at about 0.6 GB each they fit into 20 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSizes:
    """Parallel sizes of the trainer, its nodes and the engines."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    nodes: int  # of the trainer
    gpus: int  # trainer GPUs per node
    gpus_per_node: int  # GPUs that a node has
    engines: int = 0  # with prefill engines only those that decode
    gpus_per_engine: int = 1
    prefill_engines: int = 0
    gpus_per_prefill_engine: int = 1
    colocate: bool = False
    critic_nodes: int = 0  # of a critic with its own GPUs
    critic_gpus: int = 0  # per node

    @property
    def ranks(self) -> int:
        """Ranks of the policy's trainer."""
        return self.nodes * self.gpus

    @property
    def critic_ranks(self) -> int:
        """Ranks of a critic with its own GPUs."""
        return self.critic_nodes * self.critic_gpus

    @property
    def ranks_per_model(self) -> int:
        """Ranks that share one copy of the model and one micro-batch."""
        return self.tensor * self.pipeline * self.context

    @property
    def ranks_per_replica(self) -> int:
        """The fewest ranks with these parallel sizes: expert groups may span several copies of the dense layers."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert * self.expert_tensor)

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.ranks // self.ranks_per_model

    @property
    def servers(self) -> int:
        """Server processes of all engines: one on each node of an engine."""
        prefill = self.prefill_engines * -(-self.gpus_per_prefill_engine // self.gpus_per_node)
        return prefill + self.engines * -(-self.gpus_per_engine // self.gpus_per_node)

    @property
    def rollout_gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.gpus_per_engine + self.prefill_engines * self.gpus_per_prefill_engine

    @property
    def processes(self) -> int:
        """Processes that load a model: trainer ranks, ranks of a separate critic, servers."""
        return self.ranks + self.critic_ranks + self.servers

    @property
    def total_gpus(self) -> int:
        """GPUs of the whole run."""
        rollout = self.rollout_gpus
        return (max(self.ranks, rollout) if self.colocate else self.ranks + rollout) + self.critic_ranks

    @property
    def cluster_nodes(self) -> int:
        """Nodes of the whole run."""
        return -(-self.total_gpus // self.gpus_per_node)


NAMES = {
    "nodes": "cluster.actor_num_nodes",
    "gpus": "cluster.actor_num_gpus_per_node",
    "gpus_per_node": "cluster.num_gpus_per_node",
    "engines": "engines",
    "gpus_per_engine": "cluster.rollout_num_gpus_per_engine",
    "prefill_engines": "prefill engines",
    "gpus_per_prefill_engine": "GPUs of a prefill engine",
    "critic_nodes": "cluster.critic_num_nodes",
    "critic_gpus": "cluster.critic_num_gpus_per_node",
    "tensor": "tensor-parallel size",
    "pipeline": "pipeline-parallel size",
    "context": "context-parallel size",
    "expert": "expert-parallel size",
    "expert_tensor": "expert-tensor-parallel size",
}
"""Field of `LayoutSizes` -> its name for users."""


def read_sizes(config: RunConfig) -> LayoutSizes:
    """The sizes of a resolved config."""
    cluster, megatron = config.cluster, config.megatron
    groups = {group.role: group for group in server_groups(config)}
    prefill, decode = groups.get(ServerRole.prefill), groups.get(ServerRole.decode)
    has_engines = uses_engines(config) and bool(cluster.rollout_num_gpus)
    critic = has_critic_ranks(config)
    is_megatron = config.train.backend == TrainBackendName.megatron
    # Megatron-core uses the tensor-parallel size where no expert size is set.
    within = int(megatron.core_args.get("expert_tensor_parallel_size") or megatron.tensor_model_parallel_size)
    has_experts = config.model.num_experts is not None or megatron.expert_model_parallel_size > 1
    return LayoutSizes(
        tensor=megatron.tensor_model_parallel_size if is_megatron else 1,
        pipeline=megatron.pipeline_model_parallel_size if is_megatron else 1,
        context=megatron.context_parallel_size if is_megatron else config.fsdp.context_parallel_size,
        expert=megatron.expert_model_parallel_size if is_megatron else 1,
        expert_tensor=within if is_megatron and has_experts else 1,
        nodes=cluster.actor_num_nodes,
        gpus=cluster.actor_num_gpus_per_node,
        gpus_per_node=cluster.num_gpus_per_node,
        engines=(num_engines(config) if decode is None else decode.num_engines) if has_engines else 0,
        gpus_per_engine=(cluster.rollout_num_gpus_per_engine if decode is None else decode.num_gpus_per_engine),
        prefill_engines=prefill.num_engines if has_engines and prefill is not None else 0,
        gpus_per_prefill_engine=1 if prefill is None else prefill.num_gpus_per_engine,
        colocate=cluster.colocate,
        critic_nodes=(cluster.critic_num_nodes or cluster.actor_num_nodes) if critic else 0,
        critic_gpus=(cluster.critic_num_gpus_per_node or cluster.actor_num_gpus_per_node) if critic else 0,
    )


def cut_layout(sizes: LayoutSizes, *, max_processes: int = MAX_PROCESSES) -> LayoutSizes:
    """The largest layout of at most `max_processes` processes, with the pipeline of `sizes`.

    Raises:
        ConfigError: the pipeline stages alone are too many.
    """
    if sizes.processes <= max_processes:
        return sizes
    while (found := _fewest_replicas_cut(sizes, max_processes)) is None:
        smaller = _with_smaller_replica(sizes, max_processes)
        if smaller is None:
            path, rule = "megatron.pipeline_model_parallel_size", f"be below {max_processes} for a rehearsal"
            fix = "rehearse with fewer stages; a rehearsal never cuts them itself"
            raise ConfigError([Problem(path=path, rule=rule, value=str(sizes.pipeline), fix=fix)])
        sizes = smaller
    return found


def list_cuts(before: LayoutSizes, after: LayoutSizes) -> list[tuple[str, int, int]]:
    """Name, old and new value of every size that was cut."""
    names = [each.name for each in fields(LayoutSizes) if each.name in NAMES]
    values = [(name, getattr(before, name), getattr(after, name)) for name in names]
    cuts = [(NAMES[name], old, new) for name, old, new in values if old != new]
    if before.data != after.data:
        cuts.append(("data-parallel size", before.data, after.data))
    return cuts


def _fewest_replicas_cut(sizes: LayoutSizes, max_processes: int) -> LayoutSizes | None:
    """The best layout with these parallel sizes and fewer nodes, replicas and engines; None: none is small enough."""
    fitting = [each for each in _with_fewer_replicas(sizes) if each.processes <= max_processes]
    return max(fitting, key=lambda each: _fidelity(each, sizes), default=None)


def _fidelity(cut: LayoutSizes, of: LayoutSizes) -> tuple[int, ...]:
    """Order of preference: several nodes and engines where there were, whole nodes, as many engines per rank, size."""
    keeps_share = cut.rollout_gpus * of.ranks >= of.rollout_gpus * cut.ranks
    return (
        min(cut.nodes, 2),
        min(cut.engines, 2),
        min(cut.prefill_engines, 2),
        int(cut.gpus == of.gpus),
        int(keeps_share),
        min(cut.critic_ranks, cut.ranks),
        cut.ranks,
        cut.engines + cut.prefill_engines,
        cut.gpus,
    )


def _with_fewer_replicas(sizes: LayoutSizes) -> Iterator[LayoutSizes]:
    shapes = [(n, g) for n in range(1, sizes.nodes + 1) for g in _divisors(sizes.gpus)]
    critics = [(n, g) for n in range(1, sizes.critic_nodes + 1) for g in _divisors(sizes.critic_gpus)]
    for nodes, gpus in shapes:
        if (nodes * gpus) % sizes.ranks_per_replica:
            continue
        # Shared GPUs are assigned node by node, so that a node has as many as the trainer uses.
        node = gpus if sizes.colocate and sizes.gpus == sizes.gpus_per_node else sizes.gpus_per_node
        trainer = replace(sizes, nodes=nodes, gpus=gpus, gpus_per_node=node)
        for critic_nodes, critic_gpus in critics or [(0, 0)]:
            if (critic_nodes * critic_gpus) % sizes.ranks_per_replica:
                continue
            with_critic = replace(trainer, critic_nodes=critic_nodes, critic_gpus=critic_gpus)
            yield from _with_fewer_engines(with_critic)


def _with_fewer_engines(sizes: LayoutSizes) -> Iterator[LayoutSizes]:
    if not sizes.engines:
        yield sizes
        return
    node = sizes.gpus_per_node
    for engines in range(1, sizes.engines + 1):
        for prefill in range(1, sizes.prefill_engines + 1) or [0]:
            cut = replace(sizes, engines=engines, prefill_engines=prefill)
            fits_node = _fits_node(engines, cut.gpus_per_engine, node=node)
            fits_node = fits_node and _fits_node(prefill, cut.gpus_per_prefill_engine, node=node)
            if fits_node and (not sizes.colocate or _fits_trainer(cut)):
                yield cut


def _fits_node(engines: int, size: int, *, node: int) -> bool:
    """Whether an engine has a part of one node, or several whole nodes."""
    return size % node == 0 if size > node else node % size == 0 or engines * size <= node


def _fits_trainer(sizes: LayoutSizes) -> bool:
    """Whether the trainer has the GPUs of all engines, and decode engines begin where a process fits on a node."""
    before, node = sizes.prefill_engines * sizes.gpus_per_prefill_engine, sizes.gpus_per_node
    is_whole = before % min(sizes.gpus_per_engine, node) == 0 or sizes.rollout_gpus <= node
    return is_whole and sizes.rollout_gpus <= sizes.ranks


def _with_smaller_replica(sizes: LayoutSizes, max_processes: int) -> LayoutSizes | None:
    """The sizes with one of them divided: of the trainer while it alone is too large, then of the engine.

    None: only the pipeline is left.
    """
    replicas = 2 if sizes.critic_nodes else 1
    servers = min(sizes.engines, 1) + min(sizes.prefill_engines, 1)
    # Leave room for one server, or one of each kind, next to a replica.
    if replicas * sizes.ranks_per_replica + servers > max_processes:
        return _divide_trainer(sizes)
    if max(sizes.gpus_per_engine, sizes.gpus_per_prefill_engine) > 1:
        # One size stays a multiple of the other one.
        names = [name for name in ("gpus_per_engine", "gpus_per_prefill_engine") if getattr(sizes, name) > 1]
        smaller: dict[str, Any] = {name: _divided(getattr(sizes, name)) for name in names}
        return replace(sizes, **smaller)
    return _divide_trainer(sizes)


def _divide_trainer(sizes: LayoutSizes) -> LayoutSizes | None:
    """The sizes with the first that can be cut divided: context, tensor, then expert parallelism; None: all are 1.

    Tensor ranks stay 2 as long as something else can be cut: sequence parallelism needs them.
    """
    if sizes.context > 1:
        return replace(sizes, context=_divided(sizes.context))
    if max(sizes.tensor, sizes.expert_tensor) > 2:
        return _divide_tensor(sizes)
    if sizes.expert > 1:
        return replace(sizes, expert=_divided(sizes.expert))
    return _divide_tensor(sizes)


def _divide_tensor(sizes: LayoutSizes) -> LayoutSizes | None:
    # The tensor-parallel size of experts is the same unless the config sets it.
    largest = max(sizes.tensor, sizes.expert_tensor)
    if largest == 1:
        return None
    names = [name for name in ("tensor", "expert_tensor") if getattr(sizes, name) == largest]
    smaller: dict[str, Any] = dict.fromkeys(names, _divided(largest))
    return replace(sizes, **smaller)


def _divided(number: int) -> int:
    """`number` divided by its smallest prime factor: halved, if it is even."""
    return number // next(factor for factor in range(2, number + 1) if number % factor == 0)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
