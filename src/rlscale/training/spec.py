"""What a trainer rank needs to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlscale.config import (
    AlgoConfig,
    BatchConfig,
    DebugConfig,
    FsdpConfig,
    MegatronConfig,
    ModelConfig,
    OffloadMode,
    OptimConfig,
    TrainBackendName,
    TrainConfig,
)
from rlscale.models.batch_shapes import EngineShapes


class WeightOwners(StrEnum):
    """Which ranks get full weights, where a backend can choose."""

    first = "first"  # rank 0 all of them
    owners = "owners"  # each weight one that holds a part of it, of as few ranks as there can be
    holders = "holders"  # each weight one that holds a part of it, so that all ranks get about as much
    every = "every"  # every rank all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model comes from: a Hugging Face folder or hub id and, over its weights, those of a checkpoint."""

    path: str
    checkpoint: Path | None = None  # folder of one checkpoint of a trainer; None: the weights of `path`


@dataclass(frozen=True, kw_only=True, slots=True)
class DedicatedRanks:
    """Ranks that train the critic and nothing else."""

    number: int
    batch: BatchConfig  # resolved; by it the steps of a rollout are cut for these ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSpec:
    """What is the critic's own; all else it has from the policy."""

    source: ModelSource
    lr: float
    lr_warmup_iters: int = 0  # optimiser steps
    value_clip: float = 0.2
    num_only_rollouts: int = 0  # at the beginning, that leave the policy as it is
    num_only_steps: int = 0  # optimiser steps of those
    save: Path | None = None  # folder of its checkpoints; None: `critic` in each checkpoint of the run
    keep_last: int = 2  # checkpoints in `save`
    dedicated_ranks: DedicatedRanks | None = None  # None: it is on the policy's ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSpec:
    """How models leave the GPU that they share."""

    mode: OffloadMode
    keeps_copies: bool = True  # of models that move, on the host while they are on the GPU
    margin_bytes: int = 0  # of GPU memory that the memory saver keeps free


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerSpec:
    """What a rank writes down of its own work, for people who look for time and memory."""

    profile_rollouts: tuple[int, ...] = ()  # those that leave a profile
    profile_folder: Path = Path("profile")
    memory_folder: Path = Path(".")  # for what a rank leaves when it runs out of memory

    @classmethod
    def from_config(cls, debug: DebugConfig, *, run_folder: Path) -> "ProfilerSpec":
        """What the group asks for, with folders that a rank finds wherever it works."""
        return cls(
            profile_rollouts=tuple(debug.profile_rollouts or ()),
            profile_folder=Path(debug.profile_dir or run_folder / "profile").absolute(),
            memory_folder=Path(debug.memory_snapshot_dir).absolute(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The same for every rank; crosses to worker processes.

    Example:
        TrainerSpec(model_path="/models/qwen3", train=config.train, fsdp=config.fsdp, optim=config.optim,
                    algo=config.algo, temperature=1.0, max_response_len=1024, total_steps=200, device="cpu")
    """

    model_path: str  # Hugging Face folder or hub id
    train: TrainConfig
    fsdp: FsdpConfig
    optim: OptimConfig
    algo: AlgoConfig
    temperature: float  # of the rollouts; logits are divided by it
    max_response_len: int  # tokens of the longest response
    total_steps: int  # optimiser steps of the whole run
    device: str  # "cpu" | "cuda"
    timeout_minutes: float = 10.0  # that a collective may take
    engine_shapes: EngineShapes | None = None  # of the engines, with `train.true_on_policy_mode`
    start_weights: Path | None = None  # folder of Megatron-core's format to start from; None: weights of `model_path`
    ref_path: str | None = None  # reference model of a KL loss or penalty; None: there is none
    ref_checkpoint: Path | None = None  # folder of the checkpoint its weights are in; None: those of `ref_path`
    critic: CriticSpec | None = None  # the value model of ppo; None: there is none
    teacher: ModelSource | None = None  # of on-policy distillation; None: there is none
    offload: OffloadSpec | None = None  # None: every model stays on the device
    profiler: ProfilerSpec = field(default_factory=ProfilerSpec)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)  # with `train.backend=megatron`
    model: ModelConfig = field(default_factory=ModelConfig)  # likewise: what must agree with the model's own config
    weight_owners: WeightOwners = WeightOwners.first  # of the weights that go to the engines
    num_old_policies: int = 0  # weights of earlier versions that are kept to score what they generated
    custom: Mapping[str, Any] = field(default_factory=dict)  # the config's node `custom`, for functions of the user

    @property
    def context_ranks(self) -> int:
        """Ranks that share each sample."""
        is_megatron = self.train.backend == TrainBackendName.megatron
        return (self.megatron if is_megatron else self.fsdp).context_parallel_size

    @property
    def ranks_per_model(self) -> int:
        """Ranks that take one micro-batch together."""
        if self.train.backend != TrainBackendName.megatron:
            return self.context_ranks
        sizes = self.megatron
        return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * self.context_ranks
