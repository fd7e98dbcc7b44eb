"""Typed configuration of a run. The only package that uses Hydra and OmegaConf; imports neither torch nor Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlscale.config.groups.algo import (
    AdvantageEstimator,
    AlgoConfig,
    KlType,
    LossType,
    MisConfig,
    MisLevel,
    MisMode,
    PolicyLossName,
    RewardScale,
    TisType,
    compares_policies,
    learns_from_differences,
    policy_loss_of,
    uses_critic,
    uses_reference,
    uses_teacher,
)
from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.batch import BatchConfig
from rlscale.config.groups.buffer import BufferConfig
from rlscale.config.groups.checkpoint import CheckpointConfig
from rlscale.config.groups.ci import CiConfig
from rlscale.config.groups.cluster import ClusterConfig, Device, DistributedBackend, OffloadMode
from rlscale.config.groups.critic import CriticConfig
from rlscale.config.groups.data import DataConfig, LossMaskType, OnBadRow, prompt_paths, prompts_name
from rlscale.config.groups.debug import DebugConfig
from rlscale.config.groups.eval import EvalConfig
from rlscale.config.groups.fault_tolerance import FaultToleranceConfig
from rlscale.config.groups.fsdp import FLASH_ATTENTION, AttnImplementation, FsdpConfig, shares_prefixes
from rlscale.config.groups.logging import ConsoleMode, LoggingConfig, TensorboardConfig, WandbConfig, WandbMode
from rlscale.config.groups.megatron import MegatronConfig
from rlscale.config.groups.model import ModelBuild, ModelConfig
from rlscale.config.groups.network import NetworkConfig
from rlscale.config.groups.optim import LrDecayStyle, OptimConfig, OptimizerName, WsdDecayStyle
from rlscale.config.groups.reward import RewardConfig, RewardType, has_zero_reward
from rlscale.config.groups.rollout import (
    EngineKind,
    PauseMode,
    RolloutConfig,
    UpdateMode,
    WeightPrecision,
    mixes_caches,
    samples_otherwise,
)
from rlscale.config.groups.router import RouterConfig, RouterPolicy
from rlscale.config.groups.run import IdentityConfig
from rlscale.config.groups.sampling import SamplingConfig, ScheduleName
from rlscale.config.groups.sandbox import SandboxConfig, SandboxKind
from rlscale.config.groups.sglang import SglangConfig
from rlscale.config.groups.train import (
    ComputeDtype,
    LoraConfig,
    LoraSync,
    QkvFormat,
    TrainBackendName,
    TrainConfig,
    WeightChannelName,
)
from rlscale.config.run_config import RunConfig

if TYPE_CHECKING:
    from rlscale.config.from_hydra import config_from_hydra
    from rlscale.config.load import LoadedConfig, load_config, load_config_with_notes
    from rlscale.config.resolve.draft import Derived
    from rlscale.config.serialize import changed_keys, config_hash, to_dict, to_yaml

__all__ = [
    "FLASH_ATTENTION",
    "AdvantageEstimator",
    "AlgoConfig",
    "AttnImplementation",
    "BatchConfig",
    "BufferConfig",
    "CheckpointConfig",
    "CiConfig",
    "ClusterConfig",
    "ComputeDtype",
    "ConfigGroup",
    "ConsoleMode",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "Derived",
    "Device",
    "DistributedBackend",
    "EngineKind",
    "EvalConfig",
    "FaultToleranceConfig",
    "FsdpConfig",
    "IdentityConfig",
    "KlType",
    "LoadedConfig",
    "LoggingConfig",
    "LoraConfig",
    "LoraSync",
    "LossMaskType",
    "LossType",
    "LrDecayStyle",
    "MegatronConfig",
    "MisConfig",
    "MisLevel",
    "MisMode",
    "ModelBuild",
    "ModelConfig",
    "NetworkConfig",
    "OffloadMode",
    "OnBadRow",
    "OptimConfig",
    "OptimizerName",
    "PauseMode",
    "PolicyLossName",
    "QkvFormat",
    "RewardConfig",
    "RewardScale",
    "RewardType",
    "RolloutConfig",
    "RouterConfig",
    "RouterPolicy",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SandboxKind",
    "ScheduleName",
    "SglangConfig",
    "TensorboardConfig",
    "TisType",
    "TrainBackendName",
    "TrainConfig",
    "UpdateMode",
    "WandbConfig",
    "WandbMode",
    "WeightChannelName",
    "WeightPrecision",
    "WsdDecayStyle",
    "changed_keys",
    "compares_policies",
    "config_from_hydra",
    "config_hash",
    "has_zero_reward",
    "learns_from_differences",
    "load_config",
    "load_config_with_notes",
    "mixes_caches",
    "policy_loss_of",
    "prompt_paths",
    "prompts_name",
    "samples_otherwise",
    "shares_prefixes",
    "to_dict",
    "to_yaml",
    "uses_critic",
    "uses_reference",
    "uses_teacher",
]

_MODULES = {
    "Derived": "rlscale.config.resolve.draft",
    "LoadedConfig": "rlscale.config.load",
    "changed_keys": "rlscale.config.serialize",
    "config_from_hydra": "rlscale.config.from_hydra",
    "config_hash": "rlscale.config.serialize",
    "load_config": "rlscale.config.load",
    "load_config_with_notes": "rlscale.config.load",
    "to_dict": "rlscale.config.serialize",
    "to_yaml": "rlscale.config.serialize",
}


def __getattr__(name: str) -> Any:
    """Imports what needs Hydra on first use (PEP 562): ranks and engines get a config, and compose none."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, which are not all imported yet."""
    return sorted({*globals(), *__all__})
