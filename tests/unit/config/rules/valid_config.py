"""A config that satisfies every rule, and changes of it, for tests."""

from operator import attrgetter
from pathlib import Path
from typing import Any

from rlscale.config import (
    BatchConfig,
    ClusterConfig,
    DataConfig,
    EngineKind,
    ModelBuild,
    ModelConfig,
    RewardConfig,
    RewardType,
    RolloutConfig,
    RunConfig,
)

Values = dict[str, Any]
"""Values of keys by path."""

SFT: Values = {"algo.loss_type": "sft_loss", "batch.n_samples_per_prompt": 1}
MEGATRON: Values = {"train.backend": "megatron"}
SGLANG: Values = {"rollout.engine": "sglang"}
EIGHT_GPUS: Values = {"cluster.actor_num_gpus_per_node": 8}
PPO: Values = {"algo.advantage_estimator": "ppo"}
CORE_ARGS = "megatron.core_args"
PIPELINE = "megatron.pipeline_model_parallel_size"
TENSOR = "megatron.tensor_model_parallel_size"
EXPERTS = "megatron.expert_model_parallel_size"
GPUS_PER_ENGINE = "cluster.rollout_num_gpus_per_engine"
QWEN3_NEXT_FOLDER = str(Path(__file__).parents[3] / "data" / "qwen3_next")
QWEN3_FOLDER = str(Path(__file__).parents[3] / "data" / "qwen3")


def valid_config() -> RunConfig:
    """A config that satisfies every rule."""
    return RunConfig(
        model=ModelConfig(build=ModelBuild.tiny_qwen3, max_position_embeddings=4096),
        data=DataConfig(prompt_data="train.jsonl", label_key="label", num_rollout=3),
        batch=BatchConfig(rollout_batch_size=16, n_samples_per_prompt=16),
        reward=RewardConfig(type=RewardType.exact_match),
        cluster=ClusterConfig(actor_num_gpus_per_node=1, rollout_num_gpus=1),
        rollout=RolloutConfig(engine=EngineKind.embedded),
    )


def config_with(values: Values) -> RunConfig:
    """The valid config with other values of some keys; nothing is checked."""
    config = valid_config()
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(config) if group else config, name, value)
    return config
