"""Memory budgets of a run: required and available bytes per GPU, or on a CPU per node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlscale.config import Device, EngineKind, OffloadMode, RunConfig
from rlscale.errors import count_noun
from rlscale.plan.engine_memory import EngineMemory
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.hardware import Hardware
from rlscale.plan.placement import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Required and available bytes of one GPU, or on a CPU of one node."""

    where: str
    parts: Mapping[str, float]
    available: float

    @property
    def needed(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the parts fit into the memory."""
        return self.needed <= self.available


@dataclass(frozen=True, kw_only=True, slots=True)
class PartMemories:
    """Memory of one rank or GPU of each part. None: the run has no such part."""

    trainer: TrainerMemory | None
    critic: TrainerMemory | None
    engine: EngineMemory | None
    judge: EngineMemory | None = None
    prefill: EngineMemory | None = None  # of a prefill engine; `engine` is then a decode engine


def list_memory_budgets(
    config: RunConfig, layout: Layout, memories: PartMemories, hardware: Hardware
) -> list[MemoryBudget]:
    """The memory budgets: per GPU, or on a CPU per node, as all processes of a node share its memory."""
    trainer, engine = memories.trainer, memories.engine
    dedicated = memories.critic if layout.num_critics else None
    shared = None if layout.num_critics else memories.critic
    training = {} if trainer is None else _trainer_parts(config, trainer, shared)
    served = [each for each in (memories.prefill, engine) if each is not None]
    serving = {"engine": max(each.total for each in served)} if served else {}
    if config.cluster.device == Device.cpu:
        per_node = config.cluster.num_gpus_per_node
        trainers, engines = min(layout.num_trainers, per_node), min(layout.num_engines, per_node)
        critics, judges = min(layout.num_critics, per_node), min(layout.num_reward_engines, per_node)
        parts = {name: size * trainers for name, size in training.items()}
        parts |= {name: size * engines for name, size in serving.items()}
        if dedicated is not None:
            parts |= {"critic": dedicated.steady * critics, "critic's step": dedicated.step * critics}
        if memories.judge is not None:
            parts["reward engine"] = memories.judge.total * judges
        parts["processes"] = hardware.reserve_bytes * (trainers + engines + critics + judges)
        where = f"machine with {count_noun(trainers, 'trainer rank')} and {count_noun(engines, 'engine')}"
        where += f" and {count_noun(critics, 'critic rank')}" if critics else ""
        where += f" and {count_noun(judges, 'reward engine')}" if judges else ""
        return [MemoryBudget(where=where, parts=parts, available=hardware.memory_bytes)]
    runtime = {"runtime": hardware.reserve_bytes}
    available = hardware.memory_bytes
    found = []
    if dedicated is not None:
        own = {"weights": dedicated.weights, "optimizer": dedicated.optimizer, "step": dedicated.step}
        found.append(MemoryBudget(where="GPU of a critic rank", parts=own | runtime, available=available))
    if memories.judge is not None:
        own = _engine_parts(memories.judge)
        found.append(MemoryBudget(where="GPU of a reward engine", parts=own | runtime, available=available))
    names = ["an engine"] if memories.prefill is None else ["a prefill engine", "a decode engine"]
    if layout.colocate and trainer is not None and engine is not None:
        shares = [
            _shared_budget(config, training, _engine_parts(each), runtime, available, name=name.split(maxsplit=1)[1])
            for name, each in zip(names, served, strict=True)
        ]
        return [*shares, *found]
    if trainer is not None:
        found.append(MemoryBudget(where="GPU of a trainer rank", parts=training | runtime, available=available))
    for name, each in zip(names, served, strict=False):
        found.append(MemoryBudget(where=f"GPU of {name}", parts=_engine_parts(each) | runtime, available=available))
    return found


def _trainer_parts(config: RunConfig, trainer: TrainerMemory, critic: TrainerMemory | None) -> dict[str, float]:
    parts = {"weights": trainer.weights, "optimizer": trainer.optimizer, "step": trainer.step}
    scorers = {"reference": trainer.reference, "teacher": trainer.teacher}
    others = {name: size for name, size in scorers.items() if size}
    if critic is not None:
        others["critic"] = critic.steady
        # The step of the critic comes after the step of the policy.
        parts["step"] = max(trainer.step, critic.step)
    host = config.cluster.device == Device.cpu
    if config.train.keep_old_actor and host:
        parts["earlier versions"] = config.rollout.max_staleness * trainer.weights
    if not config.cluster.offload_train or config.cluster.offload_train_mode != OffloadMode.move:
        return parts | others
    if not host:
        # Models on a GPU run one at a time, the others are offloaded. A critic can be larger than a policy that trains
        # adapters, a reference or teacher can be a larger model.
        alone = [{name: size} for name, size in others.items() if name in scorers]
        if critic is not None:
            alone.append({"weights": critic.weights, "optimizer": critic.optimizer, "step": critic.step})
        largest = max(alone, key=lambda each: sum(each.values()), default={})
        if sum(largest.values()) > trainer.weights + trainer.optimizer + trainer.step:
            return largest
        return parts
    moved = trainer.weights + trainer.optimizer + sum(others.values())
    return parts | {"copies on the host": moved if config.train.weights_backuper else sum(others.values())}


def _shared_budget(
    config: RunConfig,
    training: Mapping[str, float],
    serving: Mapping[str, float],
    runtime: Mapping[str, float],
    available: float,
    *,
    name: str,
) -> MemoryBudget:
    """The budget of a GPU that trainer and engine share: both, or the larger one if each offloads for the other."""
    alternate = bool(config.cluster.offload_train) and bool(config.cluster.offload_rollout)
    parts = {**training, **serving}
    if alternate:
        parts = dict(training if sum(training.values()) > sum(serving.values()) else serving)
    where = f"GPU shared by trainer and {name}" + (", one loaded at a time" if alternate else "")
    return MemoryBudget(where=where, parts={**parts, **runtime}, available=available)


def _engine_parts(engine: EngineMemory) -> dict[str, float]:
    cache = engine.cache
    if engine.kind != EngineKind.embedded and engine.cache_tokens == 0:
        cache = engine.bytes_per_token  # no token fits: count one, so that the budget fails
    return {"engine weights": engine.weights, "engine cache": cache, "engine scratch": engine.scratch}
