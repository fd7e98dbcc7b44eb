"""What would make a run fit that does not: changes of the config, each tried by planning the changed run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlscale.config import Device, EngineKind, RunConfig, TrainBackendName
from rlscale.config.errors import show
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.rules import check_rules
from rlscale.config.unsupported import check_supported
from rlscale.plan.plan import Plan

Replan = Callable[[RunConfig], Plan]

MOST_GPUS = 4096
MOST_PARTS = 1024
SIZES = (1, 2, 4, 8, 16)
FRACTIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A changed config, and the words that change it."""

    words: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """Words for the command line that make everything fit, and what the fullest place and the whole run then need."""

    words: str
    needed: float
    available: float
    num_gpus: int


Lever = Callable[[RunConfig, Plan], Iterator[Change]]
"""The changes of one kind, the mildest first."""


def find_fixes(config: RunConfig, plan: Plan, replan: Replan) -> list[Fix]:
    """For each kind of change the mildest that suffices; when none does alone, one combination.

    Args:
        config: resolved, of a plan with over_budget.
        plan: of `config`.
        replan: plans a changed config on the same hardware and with the same lengths.
    """
    if not plan.over_budget:
        return []
    found = []
    for lever in LEVERS:
        for change in _allowed(lever(config, plan), config):
            if not (changed := replan(change.config)).over_budget:
                found.append(_fix([change.words], changed))
                break
    return found or _combination(config, plan, replan)


def _combination(config: RunConfig, plan: Plan, replan: Replan) -> list[Fix]:
    """Kind after kind, the change after which fewer places are too full, else the one that saves most."""
    words: list[str] = []
    for lever in LEVERS:
        best: tuple[Change, Plan] | None = None
        for change in _allowed(lever(config, plan), config):
            changed = replan(change.config)
            if len(changed.over_budget) < len(plan.over_budget):
                best = change, changed
                break
            if _excess(changed) < _excess(best[1] if best else plan):
                best = change, changed
        if best is None:
            continue
        words.append(best[0].words)
        config, plan = best[0].config, best[1]
        if not plan.over_budget:
            return [_fix(words, plan)]
    return []


def _allowed(changes: Iterator[Change], present: RunConfig) -> Iterator[Change]:
    """Those that keep the rules, and ask for no part that is not built and was not asked for."""
    asked = {problem.path for problem in check_supported(present)}
    for change in changes:
        if not check_rules(change.config) and {problem.path for problem in check_supported(change.config)} <= asked:
            yield change


def _excess(plan: Plan) -> float:
    return sum(demand.needed - demand.available for demand in plan.over_budget)


def _fix(words: Sequence[str], plan: Plan) -> Fix:
    fullest = max(plan.demands, key=lambda demand: demand.needed / demand.available)
    return Fix(
        words=" ".join(words), needed=fullest.needed, available=fullest.available, num_gpus=plan.layout.num_bundles
    )


def _recompute(config: RunConfig, plan: Plan) -> Iterator[Change]:
    if plan.recompute:
        return
    if config.train.backend == TrainBackendName.fsdp:
        fsdp = replace(config.fsdp, gradient_checkpointing=True)
        yield Change(words="fsdp.gradient_checkpointing=true", config=replace(config, fsdp=fsdp))
    else:
        megatron = replace(config.megatron, recompute_granularity=RecomputeGranularity.full)
        yield Change(words="megatron.recompute_granularity=full", config=replace(config, megatron=megatron))


def _smaller_microbatches(config: RunConfig, plan: Plan) -> Iterator[Change]:
    number, sample = plan.batches.samples_per_microbatch // 2, plan.lengths.sample
    while number:
        if config.batch.use_dynamic_batch_size:
            words, batch = (
                f"batch.max_tokens_per_gpu={number * sample}",
                replace(config.batch, max_tokens_per_gpu=number * sample),
            )
        else:
            words, batch = f"batch.micro_batch_size={number}", replace(config.batch, micro_batch_size=number)
        yield Change(words=words, config=replace(config, batch=batch))
        number //= 2


def _optimizer_on_host(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """Its states leave the GPU, and its step takes longer."""
    if config.cluster.device != Device.cuda or config.optim.name != OptimizerName.adam:
        return
    if config.train.backend == TrainBackendName.fsdp:
        optim = replace(config.optim, name=OptimizerName.deepspeed_cpu_adam)
        yield Change(words="optim.name=deepspeed_cpu_adam", config=replace(config, optim=optim))
        return
    wanted = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    core_args = config.megatron.core_args | wanted
    if core_args != config.megatron.core_args:
        words = " ".join(f"megatron.{name}={show(value)}" for name, value in wanted.items())
        yield Change(words=words, config=replace(config, megatron=replace(config.megatron, core_args=core_args)))


def _smaller_cache(config: RunConfig, plan: Plan) -> Iterator[Change]:
    if config.rollout.engine == EngineKind.embedded:
        slots = config.rollout.num_slots // 2
        while slots and plan.engine is not None:
            rollout = replace(config.rollout, num_slots=slots)
            yield Change(words=f"rollout.num_slots={slots}", config=replace(config, rollout=rollout))
            slots //= 2
    elif config.cluster.colocate:
        for fraction in FRACTIONS:
            if fraction < (config.sglang.mem_fraction_static or 1.0):
                sglang = replace(config.sglang, mem_fraction_static=fraction)
                yield Change(words=f"sglang.mem_fraction_static={fraction}", config=replace(config, sglang=sglang))


def _wider_engines(config: RunConfig, plan: Plan) -> Iterator[Change]:
    cluster, number = config.cluster, config.cluster.rollout_num_gpus or 0
    gpus = cluster.rollout_num_gpus_per_engine * 2
    most = number if cluster.colocate else max(number, cluster.num_gpus_per_node)
    while config.rollout.engine == EngineKind.sglang and gpus <= most:
        changed = replace(cluster, rollout_num_gpus_per_engine=gpus, rollout_num_gpus=max(number, gpus))
        words = f"cluster.rollout_num_gpus_per_engine={gpus}"
        words += f" cluster.rollout_num_gpus={gpus}" if gpus > number else ""
        yield Change(words=words, config=replace(config, cluster=changed))
        gpus *= 2


def _more_ranks(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """More GPUs of each node, then more nodes."""
    cluster = config.cluster
    each = cluster.actor_num_gpus_per_node * 2
    while each <= cluster.num_gpus_per_node:
        yield _with_ranks(config, f"cluster.actor_num_gpus_per_node={each}", cluster.actor_num_nodes, each)
        each *= 2
    nodes, each = cluster.actor_num_nodes * 2, cluster.actor_num_gpus_per_node
    while nodes * each <= MOST_GPUS:
        yield _with_ranks(config, f"cluster.actor_num_nodes={nodes}", nodes, each)
        nodes *= 2


def _with_ranks(config: RunConfig, words: str, nodes: int, each: int) -> Change:
    cluster = replace(config.cluster, actor_num_nodes=nodes, actor_num_gpus_per_node=each)
    if cluster.colocate:
        cluster = replace(cluster, rollout_num_gpus=nodes * each)
        words += f" cluster.rollout_num_gpus={nodes * each}"
    train = config.train
    if nodes > 1 and train.weight_channel == WeightChannelName.shared_memory:
        train = replace(train, weight_channel=WeightChannelName.process_group)
        words += " train.weight_channel=process_group"
    return Change(words=words, config=replace(config, cluster=cluster, train=train))


def _smaller_parts(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """The model cut over more ranks by Megatron-core, on as few nodes as that takes."""
    cluster, per_node = config.cluster, config.cluster.actor_num_gpus_per_node
    if cluster.device != Device.cuda:
        return
    nodes = cluster.actor_num_nodes
    while nodes * per_node <= MOST_PARTS:
        for pipeline in (size for size in SIZES if size <= nodes):
            for tensor in (size for size in SIZES if size <= per_node):
                if change := _with_parts(config, plan, tensor=tensor, pipeline=pipeline, nodes=nodes):
                    yield change
        nodes *= 2


def _with_parts(config: RunConfig, plan: Plan, *, tensor: int, pipeline: int, nodes: int) -> Change | None:
    """None where that is no finer cut than the present one."""
    megatron, is_megatron = config.megatron, config.train.backend == TrainBackendName.megatron
    now = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size if is_megatron else 1
    if tensor * pipeline <= now:
        return None
    own: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    handed_on: dict[str, object] = {}
    if plan.model.num_experts:
        ranks = nodes * config.cluster.actor_num_gpus_per_node // pipeline
        own["expert_model_parallel_size"] = math.gcd(ranks, plan.model.num_experts)
        handed_on = {"expert_tensor_parallel_size": 1, "sequence_parallel": True}
    words = [] if is_megatron else ["train=megatron"]
    words += [f"megatron.{name}={show(value)}" for name, value in (own | handed_on).items()]
    cut = replace(megatron, core_args=megatron.core_args | handed_on, **own)
    changed = replace(config, megatron=cut, train=replace(config.train, backend=TrainBackendName.megatron))
    if nodes == config.cluster.actor_num_nodes:
        return Change(words=" ".join(words), config=changed)
    more = _with_ranks(changed, f"cluster.actor_num_nodes={nodes}", nodes, config.cluster.actor_num_gpus_per_node)
    return replace(more, words=" ".join([*words, more.words]))


LEVERS: tuple[Lever, ...] = (
    _recompute,
    _smaller_microbatches,
    _smaller_cache,
    _optimizer_on_host,
    _wider_engines,
    _more_ranks,
    _smaller_parts,
)
