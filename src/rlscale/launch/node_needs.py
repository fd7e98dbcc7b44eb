"""Nodes of a job, and the GPUs, CPUs and memory of each, from the plan of the run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rlscale.config import Device, OptimizerName, RunConfig
from rlscale.plan import Plan

CPUS_PER_GPU = 8
"""A trainer rank, or the processes of an engine (HTTP, scheduler, detokenizer), and the threads of both."""

DRIVER_CPUS = 4
"""Driver, rewards and Ray on the first node."""

GIB = 2**30
PROCESS_GIB = 8.0
"""Host memory of a process with torch and CUDA, and of its buffers."""

DRIVER_GIB = 16.0
"""Host memory of driver, rewards and Ray."""

SAFETY = 1.25
"""Ray's object store and the page cache count as memory of a job too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNeeds:
    """Equal nodes of a job."""

    num_nodes: int
    gpus: int  # 0: a run on CPUs
    cpus: int
    memory_gib: int
    is_whole: bool  # all GPUs that a node has
    slots: int  # actors of the run that need a GPU, or a CPU in its place

    @property
    def ray_cpus(self) -> int:
        """CPUs that Ray may use: on a cluster without GPUs one per actor, so that the placement is that of the plan."""
        return self.cpus if self.gpus else self.slots

    @property
    def text(self) -> str:
        """`2 nodes with 8 GPUs, 68 CPUs and 512 GiB each`."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}, " if self.gpus else ""
        each = "" if self.num_nodes == 1 else " each"
        return f"{nodes} with {gpus}{self.cpus} CPUs and {self.memory_gib} GiB{each}"


def compute_node_needs(
    config: RunConfig, plan: Plan, *, cpus: int | None = None, memory_gib: int | None = None
) -> NodeNeeds:
    """The nodes of a run.

    Args:
        config: resolved.
        plan: of the same config.
        cpus, memory_gib: of a node, given by the user.
    """
    on_gpus = config.cluster.device != Device.cpu
    # Slots (GPUs, or CPUs in their place) by node.
    slots = Counter(place.node for place in plan.places)
    most = max(slots.values(), default=1)
    if on_gpus:
        derived_cpus, derived_gib = CPUS_PER_GPU * most + DRIVER_CPUS, _gpu_node_gib(config, plan)
    else:
        # On a cluster one CPU stands for a GPU; the driver computes little.
        derived_cpus, derived_gib = max(most, 2), _cpu_node_gib(plan)
    return NodeNeeds(
        num_nodes=max(1, len(slots)),
        gpus=most if on_gpus else 0,
        cpus=cpus or derived_cpus,
        memory_gib=memory_gib or derived_gib,
        is_whole=on_gpus and most == config.cluster.num_gpus_per_node,
        slots=most,
    )


def _cpu_node_gib(plan: Plan) -> int:
    needed = max((budget.needed for budget in plan.memory_budgets), default=0.0)
    return math.ceil(SAFETY * needed / GIB + 2)


def _gpu_node_gib(config: RunConfig, plan: Plan) -> int:
    """Host memory of the fullest node, rounded up to 16 GiB."""
    by_node: dict[int, float] = {}
    rank_gib = _rank_gib(config, plan)
    for place in plan.places:
        num_ranks = sum("rank" in actor for actor in place.actors)
        # An engine with several GPUs has a process on each of them.
        num_engines = len(place.actors) - num_ranks
        by_node[place.node] = by_node.get(place.node, 0.0) + num_ranks * rank_gib + num_engines * PROCESS_GIB
    needed = SAFETY * (max(by_node.values(), default=0.0) + DRIVER_GIB)
    return 16 * math.ceil(needed / 16)


def _rank_gib(config: RunConfig, plan: Plan) -> float:
    """Host memory of a trainer rank: of its process, its shard while it loads, and of what it offloads."""
    memory = plan.trainer
    if memory is None:
        return PROCESS_GIB
    found = memory.weights
    if config.cluster.offload_train:
        found += memory.steady
    # A reference or teacher whose weights are on the host until Megatron-core's policy borrows them.
    found += sum(phase.get("its weights", 0.0) for phase in memory.phases.values())
    # The plan counts what stays on the GPU. On the host: both moments are 8 bytes per trained parameter, with
    # Megatron-core's master weights 12.
    trained = 0.0 if plan.trained is None else plan.trained.trained / max(1, plan.layout.num_trainers)
    if config.megatron.core_args.get("optimizer_cpu_offload", False):
        found += 12 * trained
    if config.optim.name == OptimizerName.deepspeed_cpu_adam:
        found += 8 * trained
    return PROCESS_GIB + found / GIB
