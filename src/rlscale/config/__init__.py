"""The typed configuration of a run. The only user of Hydra and OmegaConf; imports neither torch nor Ray."""

from rlscale.config.algo import (
    AdvantageEstimator,
    AlgoConfig,
    KlType,
    LossType,
    TisType,
    compares_policies,
    uses_critic,
    uses_reference,
    uses_teacher,
)
from rlscale.config.batch import BatchConfig
from rlscale.config.buffer import BufferConfig
from rlscale.config.checkpoint import CheckpointConfig
from rlscale.config.ci import CiConfig
from rlscale.config.cluster import ClusterConfig, Device, DistributedBackend, OffloadMode
from rlscale.config.critic import CriticConfig
from rlscale.config.data import DataConfig
from rlscale.config.debug import DebugConfig
from rlscale.config.eval import EvalConfig
from rlscale.config.fault_tolerance import FaultToleranceConfig
from rlscale.config.fsdp import AttnImplementation, FsdpConfig
from rlscale.config.group import ConfigGroup
from rlscale.config.identity import IdentityConfig
from rlscale.config.load import Loaded, load_config, load_config_with_notes
from rlscale.config.logging import ConsoleMode, LoggingConfig, TensorboardConfig, WandbConfig, WandbMode
from rlscale.config.lora import LoraConfig
from rlscale.config.megatron import MegatronConfig
from rlscale.config.mis import MisConfig, MisLevel, MisMode
from rlscale.config.model import ModelBuild, ModelConfig
from rlscale.config.network import NetworkConfig
from rlscale.config.optim import LrDecayStyle, OptimConfig, OptimizerName, WsdDecayStyle
from rlscale.config.resolve import Derived
from rlscale.config.reward import RewardConfig, RewardType
from rlscale.config.rollout import EngineKind, PauseMode, RolloutConfig, UpdateMode, mixes_caches
from rlscale.config.router import RouterConfig, RouterPolicy
from rlscale.config.run import RunConfig
from rlscale.config.sampling import SamplingConfig
from rlscale.config.serialize import changed_keys, config_hash, to_dict, to_yaml
from rlscale.config.sglang import SglangConfig
from rlscale.config.train import ComputeDtype, QkvFormat, TrainBackendName, TrainConfig, WeightChannelName

__all__ = [
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
    "Loaded",
    "LoggingConfig",
    "LoraConfig",
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
    "OptimConfig",
    "OptimizerName",
    "PauseMode",
    "QkvFormat",
    "RewardConfig",
    "RewardType",
    "RolloutConfig",
    "RouterConfig",
    "RouterPolicy",
    "RunConfig",
    "SamplingConfig",
    "SglangConfig",
    "TensorboardConfig",
    "TisType",
    "TrainBackendName",
    "TrainConfig",
    "UpdateMode",
    "WandbConfig",
    "WandbMode",
    "WeightChannelName",
    "WsdDecayStyle",
    "changed_keys",
    "compares_policies",
    "config_hash",
    "load_config",
    "load_config_with_notes",
    "mixes_caches",
    "to_dict",
    "to_yaml",
    "uses_critic",
    "uses_reference",
    "uses_teacher",
]
