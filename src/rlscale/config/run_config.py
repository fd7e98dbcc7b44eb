"""The root of the configuration: one attribute per group."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.agent import AgentConfig
from rlscale.config.groups.algo import AlgoConfig
from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.batch import BatchConfig
from rlscale.config.groups.buffer import BufferConfig
from rlscale.config.groups.checkpoint import CheckpointConfig
from rlscale.config.groups.ci import CiConfig
from rlscale.config.groups.cluster import ClusterConfig
from rlscale.config.groups.critic import CriticConfig
from rlscale.config.groups.data import DataConfig
from rlscale.config.groups.debug import DebugConfig
from rlscale.config.groups.eval import EvalConfig
from rlscale.config.groups.fault_tolerance import FaultToleranceConfig
from rlscale.config.groups.fsdp import FsdpConfig
from rlscale.config.groups.gateway import GatewayConfig
from rlscale.config.groups.logging import LoggingConfig
from rlscale.config.groups.megatron import MegatronConfig
from rlscale.config.groups.model import ModelConfig
from rlscale.config.groups.network import NetworkConfig
from rlscale.config.groups.optim import OptimConfig
from rlscale.config.groups.reward import RewardConfig
from rlscale.config.groups.rollout import RolloutConfig
from rlscale.config.groups.router import RouterConfig
from rlscale.config.groups.run import IdentityConfig
from rlscale.config.groups.sampling import SamplingConfig
from rlscale.config.groups.sandbox import SandboxConfig
from rlscale.config.groups.sglang import SglangConfig
from rlscale.config.groups.train import TrainConfig


@dataclass(kw_only=True)
class RunConfig(ConfigGroup):
    """All settings of a run. A component receives the groups that it needs, never the whole config.

    Example:
        config = load_config(["+experiment=quickstart", "algo.eps_clip=0.1"])
        config.batch.rollout_batch_size
    """

    run: IdentityConfig = field(default_factory=IdentityConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    ci: CiConfig = field(default_factory=CiConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    custom: dict[str, Any] = field(default_factory=dict)
    """Values for your own plug-ins, e.g. `custom.max_turns=5`. rlscale does not read them."""

    custom_config_path: Annotated[str | None, Field(min_length=1)] = None
    """YAML file with a mapping that is merged into `custom` before command-line overrides are applied. None: no file.
    """
