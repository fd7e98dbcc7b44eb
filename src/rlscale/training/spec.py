"""Specification of a trainer rank: config groups, models and profiling. Without torch; crosses to worker processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlscale.architectures.architecture import ForwardCost
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
    uses_reference,
)
from rlscale.models.batch_shapes import EngineShapes
from rlscale.observe.memory_request import REQUEST_FILE


class WeightOwners(StrEnum):
    """Ranks that get full weights, where a backend can choose."""

    first = "first"  # rank 0 gets all weights
    owners = "owners"  # a weight goes to a rank that holds a part of it, with as few ranks as possible
    holders = "holders"  # a weight goes to a rank that holds a part of it, with about equal loads
    every = "every"  # every rank gets all weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Origin of a model: a Hugging Face folder or hub id, with its weights or those of a checkpoint."""

    path: str
    checkpoint: Path | None = None  # folder of one checkpoint of a trainer; None: the weights of `path`


@dataclass(frozen=True, kw_only=True, slots=True)
class DedicatedRanks:
    """Ranks that train only the critic."""

    number: int
    batch: BatchConfig  # resolved; for the micro-batches of these ranks
    cost: ForwardCost | None = None  # of the critic; None: work is not balanced


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSpec:
    """Settings of the critic; all others are the policy's."""

    source: ModelSource
    lr: float
    lr_warmup_iters: int = 0  # optimiser steps
    value_clip: float = 0.2
    num_only_rollouts: int = 0  # first rollouts, on which only the critic is trained
    num_only_steps: int = 0  # optimiser steps of those rollouts
    save: Path | None = None  # folder of its checkpoints; None: `critic` in each checkpoint of the run
    keep_last: int = 2  # checkpoints in `save`
    dedicated_ranks: DedicatedRanks | None = None  # None: it shares the ranks of the policy


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSpec:
    """Offloading of models from a shared GPU."""

    mode: OffloadMode
    keeps_copies: bool = True  # keep host memory while a model is on the GPU
    margin_bytes: int = 0  # of GPU memory that the memory saver keeps free


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerSpec:
    """Profiles and memory reports that a rank writes."""

    profile_rollouts: tuple[int, ...] = ()  # ids of profiled rollouts
    profile_folder: Path = Path("profile")
    memory_folder: Path = Path(".")  # for reports of memory
    request_file: Path | None = None  # whose change requests a report of memory; None: there is none on demand

    @classmethod
    def from_config(cls, debug: DebugConfig, *, run_folder: Path) -> "ProfilerSpec":
        """Settings of the group `debug`, with absolute folders: a rank may have another working directory."""
        return cls(
            profile_rollouts=tuple(debug.profile_rollouts or ()),
            profile_folder=Path(debug.profile_dir or run_folder / "profile").absolute(),
            memory_folder=Path(debug.memory_snapshot_dir).absolute(),
            request_file=(run_folder / REQUEST_FILE).absolute(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """Everything a trainer rank needs; the same for every rank.

    Example:
        TrainerSpec(model_path="/models/qwen3", train=config.train, fsdp=config.fsdp, optim=config.optim,
                    algo=config.algo, temperature=1.0, max_response_len=1024, total_steps=200, device="cpu")
    """

    model_path: str  # Hugging Face folder or hub id
    train: TrainConfig
    fsdp: FsdpConfig
    optim: OptimConfig
    algo: AlgoConfig
    temperature: float  # of the rollouts; divides the logits
    max_response_len: int  # tokens of the longest response
    total_steps: int  # optimiser steps of the whole run
    device: str  # "cpu" | "cuda"
    timeout_minutes: float = 10.0  # of a collective
    engine_shapes: EngineShapes | None = None  # batch shapes of the engines, with `train.true_on_policy_mode`
    start_weights: Path | None = None  # checkpoint in Megatron-core's format; None: weights of `model_path`
    ref_path: str | None = None  # reference model of a KL loss or penalty; None: no reference
    ref_checkpoint: Path | None = None  # checkpoint with its weights; None: weights of `ref_path`
    critic: CriticSpec | None = None  # value model of ppo; None: no critic
    teacher: ModelSource | None = None  # of on-policy distillation; None: no teacher
    offload: OffloadSpec | None = None  # None: every model stays on the device
    profiler: ProfilerSpec = field(default_factory=ProfilerSpec)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)  # with `train.backend=megatron`
    model: ModelConfig = field(
        default_factory=ModelConfig
    )  # with Megatron: fields that must match the model's own config
    weight_owners: WeightOwners = WeightOwners.first  # of the weights that are sent to the engines
    num_old_policies: int = 0  # earlier weight versions that are kept to score their tokens
    custom: Mapping[str, Any] = field(default_factory=dict)  # config node `custom`, for functions of the user

    @property
    def has_base_reference(self) -> bool:
        """Whether the policy trains adapters of the very model that is the reference."""
        is_base = self.ref_path == self.model_path and self.ref_checkpoint is None and self.start_weights is None
        return bool(self.train.lora.rank) and is_base and uses_reference(self.algo)

    @property
    def context_ranks(self) -> int:
        """Number of ranks that share each sample."""
        is_megatron = self.train.backend == TrainBackendName.megatron
        return (self.megatron if is_megatron else self.fsdp).context_parallel_size

    @property
    def ranks_per_model(self) -> int:
        """Number of ranks that compute one micro-batch together."""
        if self.train.backend != TrainBackendName.megatron:
            return self.context_ranks
        sizes = self.megatron
        return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * self.context_ranks
