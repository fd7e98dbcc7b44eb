"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlscale.config.groups.algo import LossType, uses_critic
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

Check = Callable[[RunConfig], list[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the keys it reads."""

    check: Check
    reads: tuple[str, ...]

    def __call__(self, config: RunConfig) -> list[Problem]:
        return self.check(config)

    @property
    def name(self) -> str:
        return self.check.__name__


def rule(*reads: str) -> Callable[[Check], Rule]:
    """Names the keys that the decorated check reads."""
    return lambda check: Rule(check, reads)


USES_ENGINES = ("algo.loss_type", "eval.interval", "debug.train_only", "debug.load_rollout_data")
"""Keys that `uses_engines` reads."""


def uses_engines(config: RunConfig) -> bool:
    """Whether the run generates at all: supervised training does so only to evaluate, training alone never."""
    if config.debug.train_only or config.debug.load_rollout_data is not None:
        return False
    return config.algo.loss_type != LossType.sft_loss or config.eval.interval is not None


CONVERSATIONS = (
    "algo.loss_type",
    "data.label_key",
    "data.apply_chat_template",
    "data.data_source_path",
)
"""Keys that `learns_conversations` reads."""


def learns_conversations(config: RunConfig) -> bool:
    """Whether supervised training learns the answers of whole conversations, and not labels."""
    data, is_sft = config.data, config.algo.loss_type == LossType.sft_loss
    return is_sft and data.data_source_path is None and data.label_key is None and data.apply_chat_template


EXTERNAL = ("rollout.external", "rollout.engine")
"""Keys that `are_external` reads."""


def are_external(config: RunConfig) -> bool:
    """Whether engines run already; `rollout.external` says so too."""
    return config.rollout.external or config.rollout.engine == EngineKind.external


def uses_decoupled_loss(config: RunConfig) -> tuple[bool, str]:
    """What `algo.decoupled_loss` comes to, and why."""
    algo, staleness = config.algo, config.rollout.max_staleness
    if algo.loss_type != LossType.policy_loss:
        return False, f"algo.loss_type is {algo.loss_type}"
    if algo.decoupled_loss is not None:
        return algo.decoupled_loss, "it is set"
    set_instead = {
        "algo.use_tis": algo.use_tis,
        "algo.use_rollout_logprobs": algo.use_rollout_logprobs,
        "train.keep_old_actor": config.train.keep_old_actor,
    }
    other = next((name for name, is_set in set_instead.items() if is_set), None)
    if staleness > 0 and other is not None:
        return False, f"{other} is set"
    return staleness > 0, f"rollout.max_staleness is {staleness}"


PARALLEL = (
    "train.backend",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
    "fsdp.context_parallel_size",
    "megatron.tensor_model_parallel_size",
    "megatron.pipeline_model_parallel_size",
    "megatron.context_parallel_size",
)
"""Keys that `num_trainer_ranks` and `ranks_per_model` read."""


def num_trainer_ranks(config: RunConfig) -> int:
    """Ranks of the policy's trainer."""
    return config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node


CRITIC_RANKS = (
    "algo.advantage_estimator",
    "algo.custom_advantage_function_path",
    "algo.loss_type",
    "cluster.critic_num_nodes",
    "cluster.critic_num_gpus_per_node",
    *PARALLEL,
)
"""Keys that `has_critic_ranks`, `num_critic_ranks` and `ranks_per_model` read."""


def has_critic_ranks(config: RunConfig) -> bool:
    """Whether there is a critic with ranks, and so GPUs, of its own; else it is on the policy's."""
    cluster = config.cluster
    given = cluster.critic_num_nodes is not None or cluster.critic_num_gpus_per_node is not None
    return given and uses_critic(config.algo)


def num_critic_ranks(config: RunConfig) -> int:
    """Ranks of a critic with GPUs of its own, given or derived."""
    cluster = config.cluster
    nodes = cluster.critic_num_nodes or cluster.actor_num_nodes
    return nodes * (cluster.critic_num_gpus_per_node or cluster.actor_num_gpus_per_node)


def ranks_per_model(config: RunConfig) -> int:
    """Ranks that take one micro-batch together: they share a copy of the model, or its sequences."""
    if config.train.backend == TrainBackendName.fsdp:
        return config.fsdp.context_parallel_size
    megatron = config.megatron
    shared = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return shared * megatron.context_parallel_size


def samples_per_step(config: RunConfig) -> int:
    """Samples of an optimiser step, given or derived."""
    batch = config.batch
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    return batch.global_batch_size or samples // (batch.num_steps_per_rollout or 1)
