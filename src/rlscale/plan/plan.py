"""The plan of a run, from its resolved config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlscale.architectures.architecture import Architecture
from rlscale.config import (
    AttnImplementation,
    Derived,
    Device,
    LoraSync,
    MegatronConfig,
    OptimizerName,
    QkvFormat,
    RunConfig,
    TrainBackendName,
    WeightChannelName,
    uses_critic,
)
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.config.library_limits import check_limits
from rlscale.config.rules import server_groups, uses_engines
from rlscale.plan.activations import AttentionKernel, MicrobatchSpec
from rlscale.plan.adapter_sizes import NO_ADAPTERS, AdapterSpec
from rlscale.plan.batches import Batches, Lengths, assume_lengths, count_batches
from rlscale.plan.checkpoint_size import CheckpointSize, checkpoint_size
from rlscale.plan.engine_memory import EngineMemory, engine_memory, group_memory, judge_memory
from rlscale.plan.engine_weights import WeightFormat
from rlscale.plan.frozen_parameters import find_frozen
from rlscale.plan.fsdp_memory import TrainerMemory, TrainerWork, trainer_memory
from rlscale.plan.hardware import DTYPE_BYTES, Hardware
from rlscale.plan.host_memory import HostMemory, host_memories
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.megatron_memory import MegatronWork, megatron_memory
from rlscale.plan.memory_budget import MemoryBudget, PartMemories, list_memory_budgets
from rlscale.plan.model_size import (
    has_base_as_reference,
    judge_architecture,
    list_architectures,
    policy_architecture,
    route_bytes_per_token,
)
from rlscale.plan.mtp_layers import MtpLayers
from rlscale.plan.placement import Layout, Place, build_layout, place_actors
from rlscale.plan.roofline import Roofline, RooflineInputs, compute_roofline
from rlscale.plan.teacher_loss import teacher_loss_memory
from rlscale.plan.tower_work import with_images
from rlscale.plan.trained_model import TrainedModel

MAX_MATRIX_LEN = 64
"""Longest sample whose attention is plain matrix products on a CPU (training/attention/packed.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncTraffic:
    """Traffic of one weight sync."""

    channel: str
    num_bytes: float
    num_buckets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a run, in bytes and seconds. `rlscale-plan --json` prints its fields."""

    name: str
    experiment: str | None
    backend: TrainBackendName
    model: Architecture
    hardware: Hardware
    lengths: Lengths
    batches: Batches
    layout: Layout
    places: tuple[Place, ...]
    trainer: TrainerMemory | None  # None: no trainer
    critic: TrainerMemory | None  # of a rank of the critic, shared or dedicated; None: no critic
    trainer_alternative: TrainerMemory | None  # with the opposite of `recompute`
    host: HostMemory | None  # of a trainer rank; None: no trainer, or Megatron-core
    critic_host: HostMemory | None  # of a rank of a critic on dedicated GPUs
    recompute: bool
    engine: EngineMemory | None  # None: no generation, or external engines
    prefill_engine: EngineMemory | None  # None: there is none, else `engine` is a decode engine
    judge: EngineMemory | None  # of an engine of `reward.engine`; None: there is none, or its model is unknown
    judge_model: str | None  # None: the starting model of the run
    memory_budgets: tuple[MemoryBudget, ...]
    sync: SyncTraffic | None
    trained: TrainedModel | None  # None: no trainer
    checkpoint: CheckpointSize | None  # None: none is saved
    roofline: Roofline
    derived: tuple[Derived, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def over_budget(self) -> tuple[MemoryBudget, ...]:
        """The budgets that do not fit."""
        return tuple(budget for budget in self.memory_budgets if not budget.fits)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, with derived sums."""
        fields = {name: asdict(getattr(self, name)) for name in ("model", "lengths", "batches", "layout")}
        return {
            "name": self.name,
            "experiment": self.experiment,
            "backend": str(self.backend),
            **fields,
            "model_totals": {"parameters": self.model.parameters, "active_parameters": self.model.active_parameters},
            "hardware": {**asdict(self.hardware), "flops": {str(k): v for k, v in self.hardware.flops.items()}},
            "places": [asdict(place) for place in self.places],
            "trainer": _memory(self.trainer),
            "critic": _memory(self.critic),
            "trainer_alternative": _memory(self.trainer_alternative),
            "host": _host(self.host),
            "critic_host": _host(self.critic_host),
            "recompute": self.recompute,
            "engine": _engine(self.engine),
            "prefill_engine": _engine(self.prefill_engine),
            "judge": _engine(self.judge),
            "judge_model": self.judge_model,
            "memory_budgets": [{**asdict(d), "needed": d.needed, "fits": d.fits} for d in self.memory_budgets],
            "sync": None if self.sync is None else asdict(self.sync),
            "trained": None if self.trained is None else self.trained.to_dict(),
            "checkpoint": None if self.checkpoint is None else self.checkpoint.to_dict(),
            "roofline": {**asdict(self.roofline), "seconds": self.roofline.seconds},
            "derived": [asdict(each) for each in self.derived],
            "warnings": list(self.warnings),
            "refused": list(self.refused),
        }


def _memory(memory: TrainerMemory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    totals = {name: getattr(memory, name) for name in ("steady", "step", "peak", "peak_phase")}
    return {**asdict(memory), **totals}


def _engine(memory: EngineMemory | None) -> dict[str, Any] | None:
    return None if memory is None else {**asdict(memory), "total": memory.total}


def _host(memory: HostMemory | None) -> dict[str, Any] | None:
    return None if memory is None else {**asdict(memory), "kept": memory.kept, "peak": memory.peak}


def make_plan(
    config: RunConfig, hardware: Hardware, *, prompt_tokens: int | None = None, response_tokens: int | None = None
) -> Plan:
    """Plans a run.

    Args:
        config, hardware: of the run, resolved.
        prompt_tokens, response_tokens: length of every prompt and response. None: the config's limits.

    Raises:
        ConfigError: the architecture of the model is unknown.
    """
    a = policy_architecture(config.model)
    models = list_architectures(config, a)
    lengths = assume_lengths(config, prompt=prompt_tokens, response=response_tokens, positions=a.max_positions)
    layout = build_layout(config)
    batches = _batches(config, a, lengths, layout)
    memories, otherwise = _part_memories(config, models, layout, lengths=lengths, batches=batches, hardware=hardware)
    hosts = host_memories(config, models, layout)
    sync = _sync(config, a) if layout.num_trainers and uses_engines(config) else None
    inputs = RooflineInputs(
        a=a,
        reference=models.get("reference"),
        lengths=lengths,
        batches=batches,
        layout=layout,
        engine=memories.engine,
        hardware=hardware,
        dtype=config.train.dtype,
        sync_bytes=sync.num_bytes if sync is not None else 0.0,
        trained=TrainedModel.from_config(config, a) if layout.num_trainers else None,
        recompute=_is_recomputed(config),
        is_one_node=layout.num_gpus <= config.cluster.num_gpus_per_node,
    )
    return Plan(
        name=config.run.name or "",
        experiment=config.run.experiment,
        backend=config.train.backend,
        model=a,
        hardware=hardware,
        lengths=lengths,
        batches=batches,
        layout=layout,
        places=tuple(_places(config, layout)),
        trainer=memories.trainer,
        critic=memories.critic,
        trainer_alternative=otherwise,
        host=hosts[0],
        critic_host=hosts[1],
        recompute=_is_recomputed(config),
        engine=memories.engine,
        prefill_engine=memories.prefill,
        judge=memories.judge,
        judge_model=config.reward.engine.hf_checkpoint if layout.num_reward_engines else None,
        memory_budgets=tuple(list_memory_budgets(config, layout, memories, hardware)),
        sync=sync,
        trained=inputs.trained,
        checkpoint=checkpoint_size(config, models) if layout.num_trainers else None,
        roofline=compute_roofline(config, inputs),
    )


def _part_memories(
    config: RunConfig,
    models: Mapping[str, Architecture],
    layout: Layout,
    *,
    lengths: Lengths,
    batches: Batches,
    hardware: Hardware,
) -> tuple[PartMemories, TrainerMemory | None]:
    """Memory of each part that the run has; and that of the trainer with the other setting of recomputation."""
    a, recompute = models["policy"], _is_recomputed(config)
    # The tables compare both settings of recomputation.
    trainer, otherwise = (
        _trainer(_with_recompute(config, each), models, batches, lengths) if layout.num_trainers else None
        for each in (recompute, not recompute)
    )
    critic = None
    if layout.num_trainers and "critic" in models:
        critic = _critic(_with_recompute(config, recompute), models["critic"], layout, lengths)
    prefill, engine = _engines(config, a, lengths, hardware) if layout.num_engines else (None, None)
    judge = _judge(config, a, lengths, hardware) if layout.num_reward_engines else None
    return PartMemories(trainer=trainer, critic=critic, engine=engine, judge=judge, prefill=prefill), otherwise


def _engines(
    config: RunConfig, a: Architecture, lengths: Lengths, hardware: Hardware
) -> tuple[EngineMemory | None, EngineMemory]:
    """Memory of a prefill engine, if there are any, and of an engine that generates."""
    groups = [group_memory(config, group, a, lengths, hardware=hardware) for group in server_groups(config)]
    if groups:
        prefill, decode = groups
        return prefill, decode
    return None, engine_memory(config, a, lengths, hardware=hardware)


def _places(config: RunConfig, layout: Layout) -> list[Place]:
    return place_actors(layout, gpus_per_node=config.cluster.num_gpus_per_node, has_critic=uses_critic(config.algo))


def find_refused(config: RunConfig, derived: Sequence[Derived]) -> tuple[str, ...]:
    """Features that this version does not run, by values that are set in the config, not derived."""
    found = {each.key for each in derived}
    return tuple(str(problem) for problem in check_limits(config) if problem.path not in found)


def _batches(config: RunConfig, a: Architecture, lengths: Lengths, layout: Layout) -> Batches:
    batches = _batches_on(config, lengths, layout.num_trainers)
    if not config.algo.use_rollout_routing_replay:
        return batches
    return replace(batches, route_bytes=batches.tokens * route_bytes_per_token(a))


def _batches_on(config: RunConfig, lengths: Lengths, num_ranks: int) -> Batches:
    ranks, context = max(1, num_ranks // config.fsdp.context_parallel_size), config.fsdp.context_parallel_size
    if config.train.backend == TrainBackendName.megatron:
        parallel = ParallelSizes.from_config(config.megatron, num_ranks)
        ranks, context = parallel.data, parallel.context
    return count_batches(config.batch, lengths, ranks=ranks, context_ranks=context, epochs=config.algo.ppo_epochs)


def _is_recomputed(config: RunConfig) -> bool:
    if config.train.backend == TrainBackendName.megatron:
        return config.megatron.recompute_granularity == RecomputeGranularity.full
    return config.fsdp.gradient_checkpointing


def _with_recompute(config: RunConfig, recompute: bool) -> RunConfig:
    granularity = RecomputeGranularity.full if recompute else None
    return replace(
        config,
        fsdp=replace(config.fsdp, gradient_checkpointing=recompute),
        megatron=replace(config.megatron, recompute_granularity=granularity),
    )


def _judge(config: RunConfig, policy: Architecture, lengths: Lengths, hardware: Hardware) -> EngineMemory | None:
    a = judge_architecture(config, policy)
    return None if a is None else judge_memory(config, a, lengths, hardware=hardware)


def _critic(config: RunConfig, a: Architecture, layout: Layout, lengths: Lengths) -> TrainerMemory:
    """The memory of a rank of the critic, with one value per token instead of logits."""
    num_ranks = layout.num_critics or layout.num_trainers
    work = _work(config, _batches_on(config, lengths, num_ranks), lengths, num_ranks=num_ranks)
    # Next to adapters all weights of a critic are trained, otherwise those that the patterns leave.
    frozen = find_frozen(a, config.train)
    if config.train.backend == TrainBackendName.megatron:
        megatron_work = MegatronWork(
            num_ranks=num_ranks, num_microbatches=work.num_microbatches, is_critic=True, frozen=frozen
        )
        return megatron_memory(a, _megatron_config(config), work.largest, work=megatron_work)
    return trainer_memory(a, replace(work, adapters=NO_ADAPTERS, has_values=True, frozen=frozen))


def _trainer(
    config: RunConfig, models: Mapping[str, Architecture], batches: Batches, lengths: Lengths
) -> TrainerMemory:
    a, scorers = models["policy"], {role: models[role] for role in ("reference", "teacher") if role in models}
    num_ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    work = _work(config, batches, lengths, num_ranks=num_ranks)
    if has_base_as_reference(config):
        scorers.pop("reference")
    mtp = MtpLayers.from_config(config)
    work = replace(work, frozen=find_frozen(a, config.train, num_mtp=mtp.number))
    if a.tower is not None:
        work = replace(work, largest=with_images(work.largest, config, batches, lengths))
    if config.train.backend == TrainBackendName.megatron:
        megatron_work = MegatronWork(
            num_ranks=num_ranks,
            num_microbatches=work.num_microbatches,
            scorers=scorers,
            sends_own=config.train.weight_channel != WeightChannelName.shared_memory,
            adapters=work.adapters,
            mtp=mtp,
            frozen=work.frozen,
        )
        memory = megatron_memory(a, _megatron_config(config), work.largest, work=megatron_work)
    else:
        memory = trainer_memory(a, work, **scorers)
    extra = teacher_loss_memory(config, models, work.largest)
    return memory if extra is None else extra.added_to(memory)


def _megatron_config(config: RunConfig) -> MegatronConfig:
    """Parallel sizes and optimiser. Muon's state is not sharded; the plan counts as much for it as for Adam."""
    is_sharded = config.megatron.use_distributed_optimizer and config.optim.name != OptimizerName.muon
    return replace(config.megatron, use_distributed_optimizer=is_sharded)


def _allows_fused_layers(config: RunConfig) -> bool:
    """Whether the config allows the fused layers of training/cpu/fused_layers.py."""
    train = config.train
    plain = train.backend == TrainBackendName.fsdp and train.lora.rank == 0
    return plain and not train.true_on_policy_mode and train.qkv_format == QkvFormat.thd


def _work(config: RunConfig, batches: Batches, lengths: Lengths, *, num_ranks: int) -> TrainerWork:
    """The work of each of `num_ranks` ranks in a step."""
    micro = MicrobatchSpec(
        tokens=batches.microbatch_tokens,
        logit_rows=batches.samples_per_microbatch * lengths.response,
        sample_len=lengths.sample,
        dtype_bytes=DTYPE_BYTES[config.train.dtype],
        kernel=_kernel(config, lengths),
        device="cpu" if config.cluster.device == Device.cpu else "cuda",
        chunk_tokens=config.train.log_probs_chunk_size,
        may_fuse=_allows_fused_layers(config),
    )
    context = config.fsdp.context_parallel_size
    if context > 1 and config.train.backend == TrainBackendName.fsdp:
        tokens = math.ceil(micro.tokens / context)
        # Samples are sharded whole, so a rank may get only response tokens.
        rows = min(micro.logit_rows, tokens)
        micro = replace(micro, tokens=tokens, logit_rows=rows, kernel=AttentionKernel.fused, context_ranks=context)
    return TrainerWork(
        num_ranks=num_ranks,
        num_microbatches=batches.microbatches_per_rank,
        recompute=config.fsdp.gradient_checkpointing,
        largest=micro,
        optimizer=config.optim.name,
        adapters=AdapterSpec.from_config(config.train),
        on_cpu=config.cluster.device == Device.cpu,
    )


def _kernel(config: RunConfig, lengths: Lengths) -> AttentionKernel:
    if config.fsdp.attn_implementation == AttnImplementation.eager:
        return AttentionKernel.eager
    if config.train.qkv_format == QkvFormat.bshd:
        return AttentionKernel.fused
    on_cpu = config.cluster.device == Device.cpu
    return AttentionKernel.matrix if on_cpu and lengths.sample <= MAX_MATRIX_LEN else AttentionKernel.fused


def _sync(config: RunConfig, a: Architecture) -> SyncTraffic:
    lora, dtype_bytes = config.train.lora, DTYPE_BYTES[config.train.dtype]
    if lora.rank and lora.sync == LoraSync.adapter:
        # One message to each engine; the base goes through the weight channel, once.
        num_bytes = AdapterSpec.from_config(config.train).elements(a) * dtype_bytes
        return SyncTraffic(channel="adapters over HTTP", num_bytes=num_bytes, num_buckets=1)
    weights = WeightFormat(dtype_bytes=dtype_bytes, precision=config.rollout.weight_precision)
    num_bytes = weights.model_bytes(a) + dtype_bytes * MtpLayers.from_config(config).parameters(a)
    channel = config.train.weight_channel
    number = max(1, math.ceil(num_bytes / config.train.update_weight_buffer_size))
    return SyncTraffic(channel=str(channel), num_bytes=num_bytes, num_buckets=number)
