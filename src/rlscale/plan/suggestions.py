"""Changes of the config that make an oversized run fit. Each candidate is checked with a plan of the changed run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlscale.config import Device, EngineKind, RunConfig, TrainBackendName
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.library_limits import check_limits
from rlscale.config.problems import show
from rlscale.config.rules import check_rules, server_groups
from rlscale.plan.plan import Plan

Replan = Callable[[RunConfig], Plan]

MAX_GPUS = 4096
MAX_SHARDS = 1024
PARALLEL_SIZES = (1, 2, 4, 8, 16)
MEM_FRACTIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A changed config, and the overrides that change it."""

    overrides: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Overrides for the command line that make a run fit, and the resources that it then needs."""

    overrides: str
    needed: float  # bytes in the fullest memory budget
    available: float  # bytes in the same budget
    num_gpus: int  # of the whole run


ChangeKind = Callable[[RunConfig, Plan], Iterator[Change]]
"""Changes of one kind, the smallest first."""


def find_suggestions(config: RunConfig, plan: Plan, replan: Replan) -> list[Suggestion]:
    """The smallest sufficient change of each kind; if no kind suffices alone, one combination.

    Args:
        config: resolved, of a plan that is over budget.
        plan: of `config`.
        replan: plans a changed config with the same hardware and lengths.
    """
    if not plan.over_budget:
        return []
    found = []
    for kind in CHANGE_KINDS:
        for change in _allowed(kind(config, plan), config):
            if not (changed := replan(change.config)).over_budget:
                found.append(_suggestion([change.overrides], changed))
                break
    return found or _combination(config, plan, replan)


def _combination(config: RunConfig, plan: Plan, replan: Replan) -> list[Suggestion]:
    """Applies kind after kind the change after which fewer budgets are exceeded, else the one that saves most."""
    overrides: list[str] = []
    # Later kinds start from the config that earlier kinds have changed.
    for kind in CHANGE_KINDS:
        best: tuple[Change, Plan] | None = None
        for change in _allowed(kind(config, plan), config):
            changed = replan(change.config)
            if len(changed.over_budget) < len(plan.over_budget):
                best = change, changed
                break
            if _excess_bytes(changed) < _excess_bytes(best[1] if best else plan):
                best = change, changed
        if best is None:
            continue
        overrides.append(best[0].overrides)
        config, plan = best[0].config, best[1]
        if not plan.over_budget:
            return [_suggestion(overrides, plan)]
    return []


def _allowed(changes: Iterator[Change], present: RunConfig) -> Iterator[Change]:
    """The changes that satisfy the rules and use no further refused feature."""
    refused = {problem.path for problem in check_limits(present)}
    for change in changes:
        changed = {problem.path for problem in check_limits(change.config)}
        if changed <= refused and not check_rules(change.config):
            yield change


def _excess_bytes(plan: Plan) -> float:
    """Bytes that are missing in all exceeded budgets."""
    return sum(budget.needed - budget.available for budget in plan.over_budget)


def _suggestion(overrides: Sequence[str], plan: Plan) -> Suggestion:
    fullest = max(plan.memory_budgets, key=lambda budget: budget.needed / budget.available)
    return Suggestion(
        overrides=" ".join(overrides),
        needed=fullest.needed,
        available=fullest.available,
        num_gpus=plan.layout.num_gpus,
    )


def _recompute(config: RunConfig, plan: Plan) -> Iterator[Change]:
    if plan.recompute:
        return
    if config.train.backend == TrainBackendName.fsdp:
        fsdp = replace(config.fsdp, gradient_checkpointing=True)
        yield Change(overrides="fsdp.gradient_checkpointing=true", config=replace(config, fsdp=fsdp))
    else:
        megatron = replace(config.megatron, recompute_granularity=RecomputeGranularity.full)
        yield Change(overrides="megatron.recompute_granularity=full", config=replace(config, megatron=megatron))


def _smaller_microbatches(config: RunConfig, plan: Plan) -> Iterator[Change]:
    number, sample = plan.batches.samples_per_microbatch // 2, plan.lengths.sample
    while number:
        if config.batch.use_dynamic_batch_size:
            overrides, batch = (
                f"batch.max_tokens_per_gpu={number * sample}",
                replace(config.batch, max_tokens_per_gpu=number * sample),
            )
        else:
            overrides, batch = f"batch.micro_batch_size={number}", replace(config.batch, micro_batch_size=number)
        yield Change(overrides=overrides, config=replace(config, batch=batch))
        number //= 2


def _optimizer_on_host(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """The states of the optimizer in host memory; its step takes longer."""
    if config.cluster.device != Device.cuda or config.optim.name != OptimizerName.adam:
        return
    if config.train.backend == TrainBackendName.fsdp:
        optim = replace(config.optim, name=OptimizerName.deepspeed_cpu_adam)
        yield Change(overrides="optim.name=deepspeed_cpu_adam", config=replace(config, optim=optim))
        return
    offloaded = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    core_args = config.megatron.core_args | offloaded
    if core_args != config.megatron.core_args:
        overrides = " ".join(f"megatron.{name}={show(value)}" for name, value in offloaded.items())
        yield Change(
            overrides=overrides, config=replace(config, megatron=replace(config.megatron, core_args=core_args))
        )


def _smaller_cache(config: RunConfig, plan: Plan) -> Iterator[Change]:
    if config.rollout.engine == EngineKind.embedded:
        slots = config.rollout.num_slots // 2
        while slots and plan.engine is not None:
            rollout = replace(config.rollout, num_slots=slots)
            yield Change(overrides=f"rollout.num_slots={slots}", config=replace(config, rollout=rollout))
            slots //= 2
    elif config.cluster.colocate:
        for fraction in MEM_FRACTIONS:
            if fraction < (config.sglang.mem_fraction_static or 1.0):
                sglang = replace(config.sglang, mem_fraction_static=fraction)
                yield Change(overrides=f"sglang.mem_fraction_static={fraction}", config=replace(config, sglang=sglang))


def _wider_engines(config: RunConfig, plan: Plan) -> Iterator[Change]:
    cluster, number = config.cluster, config.cluster.rollout_num_gpus or 0
    gpus = cluster.rollout_num_gpus_per_engine * 2
    limit = number if cluster.colocate else max(number, cluster.num_gpus_per_node)
    # The file of sglang.config sets the sizes of prefill and decode engines.
    while config.rollout.engine == EngineKind.sglang and gpus <= limit and not server_groups(config):
        changed = replace(cluster, rollout_num_gpus_per_engine=gpus, rollout_num_gpus=max(number, gpus))
        overrides = f"cluster.rollout_num_gpus_per_engine={gpus}"
        overrides += f" cluster.rollout_num_gpus={gpus}" if gpus > number else ""
        yield Change(overrides=overrides, config=replace(config, cluster=changed))
        gpus *= 2


def _wider_reward_engines(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """More GPUs per engine of the judge, and more GPUs of all of them if they are fewer."""
    engine = config.reward.engine
    gpus = engine.num_gpus_per_engine * 2
    is_sglang = plan.judge is not None and plan.judge.kind == EngineKind.sglang
    while is_sglang and gpus <= config.cluster.num_gpus_per_node:
        # Engines are whole: their number of GPUs is a multiple of the GPUs of one.
        number = -(-engine.num_gpus // gpus) * gpus
        changed = replace(engine, num_gpus_per_engine=gpus, num_gpus=number)
        overrides = f"reward.engine.num_gpus_per_engine={gpus}"
        overrides += f" reward.engine.num_gpus={number}" if number != engine.num_gpus else ""
        yield Change(overrides=overrides, config=replace(config, reward=replace(config.reward, engine=changed)))
        gpus *= 2


def _more_ranks(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """More GPUs per node, then more nodes."""
    cluster = config.cluster
    each = cluster.actor_num_gpus_per_node * 2
    while each <= cluster.num_gpus_per_node:
        yield _with_ranks(config, f"cluster.actor_num_gpus_per_node={each}", cluster.actor_num_nodes, each)
        each *= 2
    nodes, each = cluster.actor_num_nodes * 2, cluster.actor_num_gpus_per_node
    while nodes * each <= MAX_GPUS:
        yield _with_ranks(config, f"cluster.actor_num_nodes={nodes}", nodes, each)
        nodes *= 2


def _with_ranks(config: RunConfig, overrides: str, nodes: int, each: int) -> Change:
    cluster = replace(config.cluster, actor_num_nodes=nodes, actor_num_gpus_per_node=each)
    if cluster.colocate:
        cluster = replace(cluster, rollout_num_gpus=nodes * each)
        overrides += f" cluster.rollout_num_gpus={nodes * each}"
    train = config.train
    if nodes > 1 and train.weight_channel == WeightChannelName.shared_memory and cluster.device == Device.cpu:
        train = replace(train, weight_channel=WeightChannelName.process_group)
        overrides += " train.weight_channel=process_group"
    return Change(overrides=overrides, config=replace(config, cluster=cluster, train=train))


def _model_parallelism(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """Tensor and pipeline parallelism with Megatron-core, on as few nodes as possible."""
    cluster, per_node = config.cluster, config.cluster.actor_num_gpus_per_node
    if cluster.device != Device.cuda:
        return
    nodes = cluster.actor_num_nodes
    # Fewer nodes first, and pipeline stages only across nodes: tensor parallelism needs the links inside of a node.
    while nodes * per_node <= MAX_SHARDS:
        for pipeline in (size for size in PARALLEL_SIZES if size <= nodes):
            for tensor in (size for size in PARALLEL_SIZES if size <= per_node):
                if change := _with_parallel_sizes(config, plan, tensor=tensor, pipeline=pipeline, nodes=nodes):
                    yield change
        nodes *= 2


def _with_parallel_sizes(config: RunConfig, plan: Plan, *, tensor: int, pipeline: int, nodes: int) -> Change | None:
    """The config with other parallel sizes. None: they shard the model no further than the present ones."""
    megatron, is_megatron = config.megatron, config.train.backend == TrainBackendName.megatron
    present = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size if is_megatron else 1
    if tensor * pipeline <= present:
        return None
    own: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    core_args: dict[str, object] = {}
    if plan.model.num_experts:
        # As many experts per rank as divide evenly.
        ranks = nodes * config.cluster.actor_num_gpus_per_node // pipeline
        own["expert_model_parallel_size"] = math.gcd(ranks, plan.model.num_experts)
        core_args = {"expert_tensor_parallel_size": 1, "sequence_parallel": True}
    overrides = [] if is_megatron else ["train=megatron"]
    overrides += [f"megatron.{name}={show(value)}" for name, value in (own | core_args).items()]
    cut = replace(megatron, core_args=megatron.core_args | core_args, **own)
    changed = replace(config, megatron=cut, train=replace(config.train, backend=TrainBackendName.megatron))
    if nodes == config.cluster.actor_num_nodes:
        return Change(overrides=" ".join(overrides), config=changed)
    more = _with_ranks(changed, f"cluster.actor_num_nodes={nodes}", nodes, config.cluster.actor_num_gpus_per_node)
    return replace(more, overrides=" ".join([*overrides, more.overrides]))


CHANGE_KINDS: tuple[ChangeKind, ...] = (
    _recompute,
    _smaller_microbatches,
    _smaller_cache,
    _optimizer_on_host,
    _wider_engines,
    _wider_reward_engines,
    _more_ranks,
    _model_parallelism,
)
