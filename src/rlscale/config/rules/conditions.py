"""Conditions that several rules, the resolve step and other packages derive from a config."""

from __future__ import annotations

from dataclasses import fields

from rlscale.config.groups.algo import LossType, uses_critic, uses_teacher
from rlscale.config.groups.cluster import LOCAL_RAY, Device
from rlscale.config.groups.judge import RewardEngineConfig, RewardEngineKind
from rlscale.config.groups.reward import RewardType
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import LoraSync, TrainBackendName
from rlscale.config.keys import keys
from rlscale.config.run_config import RunConfig
from rlscale.config.server_groups import ServerGroup, read_server_groups, view_group


def is_sft(config: RunConfig) -> bool:
    """Whether the run is supervised training."""
    return config.algo.loss_type == LossType.sft_loss


def uses_megatron(config: RunConfig) -> bool:
    """Whether the trainer is the Megatron-core backend."""
    return config.train.backend == TrainBackendName.megatron


def keeps_old_policies(config: RunConfig) -> bool:
    """Whether earlier weights are kept: tokens are older than the current ones only with `rollout.max_staleness`."""
    return config.train.keep_old_actor and config.rollout.max_staleness > 0


def uses_engines(config: RunConfig) -> bool:
    """Whether the run generates: supervised training only for evaluation, a train-only run never."""
    if config.debug.train_only or config.debug.load_rollout_data is not None:
        return False
    return not is_sft(config) or config.eval.interval is not None


def overlaps(config: RunConfig) -> bool:
    """Whether engines generate while the trainer works: ahead of it, which supervised training does not."""
    return config.rollout.max_staleness > 0 and uses_engines(config) and not is_sft(config)


def resyncs_engines(config: RunConfig) -> bool:
    """Whether a restarted engine gets the current weights in a sync that pauses the others within a rollout."""
    return config.fault_tolerance.enabled and uses_engines(config) and not is_sft(config)


def only_evaluates(config: RunConfig) -> bool:
    """Whether the run has neither rollouts nor a trainer, as `rlscale-eval` starts it."""
    return config.debug.rollout_only and config.data.num_rollout == 0


def asks_teachers(config: RunConfig) -> bool:
    """Whether samples get the logprobs of teachers behind URLs."""
    has_servers = config.model.teacher_url is not None or bool(config.data.teacher_by_source)
    return has_servers and uses_teacher(config.algo) and uses_engines(config) and not config.debug.rollout_only


def reads_buffer(config: RunConfig) -> bool:
    """Whether the groups of the run are those that other processes submit to `buffer.url`."""
    return config.buffer.url is not None and uses_engines(config) and not is_sft(config)


def shares_base(config: RunConfig) -> bool:
    """Whether the run uses the engines of the other jobs of its sweep, if it is a job of one."""
    lora = config.train.lora
    return lora.shared_base and lora.rank > 0 and uses_engines(config) and not config.debug.rollout_only


def sends_adapters(config: RunConfig) -> bool:
    """Whether the engines hold the base and get adapters alone."""
    lora = config.train.lora
    is_trained = lora.rank > 0 and lora.sync == LoraSync.adapter and not config.debug.rollout_only
    return is_trained and uses_engines(config)


def scores_samples(config: RunConfig) -> bool:
    """Whether the run computes rewards: for its samples, or for an evaluation."""
    return uses_engines(config) and (not reads_buffer(config) or config.eval.interval is not None)


def builtin_rewards(config: RunConfig) -> dict[str, str]:
    """The built-in rewards that score samples, by the key that names each."""
    reward = config.reward
    if reward.functions:
        return {f"reward.functions.{key}": name for key, name in reward.functions.items() if name in list(RewardType)}
    if reward.type is None or reward.custom_path is not None:
        return {}
    of_sources = {f"data.reward_by_source.{key}": name for key, name in config.data.reward_by_source.items()}
    return {"reward.type": reward.type} | {key: name for key, name in of_sources.items() if name in list(RewardType)}


def has_reward_engines(config: RunConfig) -> bool:
    """Whether the run starts engines of a judge or reward model."""
    return config.reward.engine.num_gpus > 0 and uses_engines(config)


def frozen_models(config: RunConfig) -> dict[str, RewardEngineConfig]:
    """Further models that the run starts for user code, by name; see `sglang.frozen_models`."""
    if not uses_engines(config) or config.rollout.engine != EngineKind.sglang or config.rollout.external:
        return {}
    known = {each.name for each in fields(RewardEngineConfig)}
    # Other values are not of a file, which a rule reports.
    given = {name: values for name, values in config.sglang.frozen_models.items() if isinstance(values, dict)}
    return {name: RewardEngineConfig(**values) for name, values in given.items() if set(values) <= known}


def server_groups(config: RunConfig) -> tuple[ServerGroup, ...]:
    """Prefill and decode servers of the run, see `sglang.server_groups`; empty: every engine does both."""
    given = config.sglang.server_groups
    # First, so that a check of a run without groups reads no other key.
    if not given or not uses_engines(config):
        return ()
    if config.rollout.engine != EngineKind.sglang or config.rollout.external:
        return ()
    return read_server_groups(given, config.cluster.rollout_num_gpus_per_engine)


def has_draft_model(config: RunConfig) -> bool:
    """Whether SGLang servers of the run draft tokens with a model that is not the policy."""
    if config.rollout.engine != EngineKind.sglang or not uses_engines(config):
        return False
    views = (config, *engine_views(config))
    paths = {each.sglang.server_args.get("speculative_draft_model_path") for each in views}
    return not paths <= {None, config.model.hf_checkpoint}


def engine_views(config: RunConfig) -> tuple[RunConfig, ...]:
    """The config with the sizes and arguments of each kind of engine: of both groups, or the config itself."""
    return tuple(view_group(config, group) for group in server_groups(config)) or (config,)


def num_engines(config: RunConfig) -> int:
    """Number of engines of the policy that the run starts."""
    return sum(num_engine_gpus(each) // each.cluster.rollout_num_gpus_per_engine for each in engine_views(config))


def reward_engine_kind(config: RunConfig) -> RewardEngineKind:
    """The kind of these engines, set or that of the rollout engines."""
    given = config.reward.engine.kind
    if given is not None:
        return given
    is_embedded = config.rollout.engine in (EngineKind.embedded, EngineKind.scripted)
    return RewardEngineKind.embedded if is_embedded else RewardEngineKind.sglang


def uses_external_engines(config: RunConfig) -> bool:
    """Whether the run uses servers that it does not start, by `rollout.engine` or `rollout.external`."""
    return config.rollout.external or config.rollout.engine == EngineKind.external


def uses_router(config: RunConfig) -> bool:
    """Whether generation requests go through a router."""
    if not uses_engines(config) or config.router.enabled is False or uses_external_engines(config):
        return False
    if config.router.use_middleware_router:
        return True
    # sglang-router drops the request field that asks for expert routes. A version of an adapter, which a request names,
    # is not loaded by all engines at the same time.
    several = num_engine_gpus(config) > config.cluster.rollout_num_gpus_per_engine or bool(server_groups(config))
    several = several and not config.algo.use_rollout_routing_replay and not sends_adapters(config)
    return config.router.enabled is True or (several and config.rollout.engine == EngineKind.sglang)


def uses_sglang_router(config: RunConfig) -> bool:
    """Whether that router is sglang-router, which changes some requests."""
    return uses_router(config) and not config.router.use_middleware_router


def num_engine_gpus(config: RunConfig) -> int:
    """Number of GPUs of all engines that the run starts, set or derived; without a value those of the trainer."""
    number = config.cluster.rollout_num_gpus
    return num_trainer_ranks(config) if number is None else number


def nodes_per_engine(config: RunConfig) -> int:
    """Number of nodes of an engine, each with one process of SGLang."""
    return -(-config.cluster.rollout_num_gpus_per_engine // num_gpus_per_node(config))


def pipeline_stages(config: RunConfig) -> int:
    """Number of pipeline stages of an SGLang engine; 1 with other engines, or if the value is invalid."""
    stages = config.sglang.server_args.get("pp_size") if config.rollout.engine == EngineKind.sglang else 1
    return stages if isinstance(stages, int) and stages > 0 else 1


def attention_groups(config: RunConfig) -> int:
    """Number of groups of data-parallel attention of an SGLang engine; 1 with other engines, or if it is invalid."""
    given = config.sglang.server_args if config.rollout.engine == EngineKind.sglang else {}
    groups = given.get("attn_dp_size") or 1
    if groups == 1 and given.get("enable_dp_attention"):
        groups = given.get("dp_size") or 1  # SGLang's old name
    return groups if isinstance(groups, int) and groups > 0 else 1


def opens_gpu_memory(config: RunConfig) -> bool:
    """Whether every rank of an engine can open the memory of a trainer rank that is on the same GPU.

    True also while `cluster.device` is unknown. With pipeline stages SGLang opens the memory of the ranks of the first
    stage on all stages, and torch would never free that of the others.
    """
    cluster = config.cluster
    if not cluster.colocate or cluster.device == Device.cpu or uses_external_engines(config):
        return False
    one_stage = all(pipeline_stages(each) == 1 for each in engine_views(config))
    return one_stage and num_engine_gpus(config) <= num_trainer_ranks(config)


def attaches(config: RunConfig) -> bool:
    """Whether `cluster.ray_address` names a running Ray cluster; `local` is the one that the run starts."""
    return config.cluster.ray_address not in (None, LOCAL_RAY)


def learns_conversations(config: RunConfig) -> bool:
    """Whether supervised training learns the answers of whole conversations instead of labels."""
    data = config.data
    return is_sft(config) and data.data_source_path is None and data.label_key is None and data.apply_chat_template


def resolve_decoupled_loss(config: RunConfig) -> tuple[bool, str]:
    """Returns the value of `algo.decoupled_loss`, set or derived, and the reason."""
    algo, staleness = config.algo, config.rollout.max_staleness
    if algo.loss_type != LossType.policy_loss:
        return False, f"algo.loss_type is {algo.loss_type}"
    if algo.decoupled_loss is not None:
        return algo.decoupled_loss, "it is set"
    # Each of these options already defines the old logprobs or the weights.
    alternatives = {
        "algo.use_tis": algo.use_tis,
        "algo.use_rollout_logprobs": algo.use_rollout_logprobs,
        "train.keep_old_actor": config.train.keep_old_actor,
    }
    other = next((name for name, is_set in alternatives.items() if is_set), None)
    if staleness > 0 and other is not None:
        return False, f"{other} is set"
    return staleness > 0, f"rollout.max_staleness is {staleness}"


def offloads_engines(config: RunConfig) -> bool:
    """Whether engines release their memory during training, set or derived."""
    cluster = config.cluster
    given = cluster.offload_rollout
    return uses_engines(config) and (given if given is not None else cluster.offload or cluster.colocate)


def offloads_trainer(config: RunConfig) -> bool:
    """Whether the trainer is offloaded during generation, set or derived."""
    cluster = config.cluster
    given = cluster.offload_train
    if config.debug.rollout_only or not uses_engines(config):
        return False
    # Policy and critic on the same GPUs are offloaded alternately.
    shares = uses_critic(config.algo) and not has_critic_ranks(config)
    return given if given is not None else cluster.offload or cluster.colocate or shares


def num_gpus_per_node(config: RunConfig) -> int:
    """Number of GPUs of a node, set or derived.

    Shared GPUs are assigned node by node. So nodes of which the trainer uses a part, colocated, count with that part.
    """
    cluster, default = config.cluster, keys()["cluster.num_gpus_per_node"].default
    used = cluster.actor_num_gpus_per_node
    is_derived = cluster.colocate and cluster.num_gpus_per_node == default and used < default and uses_engines(config)
    return used if is_derived else cluster.num_gpus_per_node


def num_trainer_ranks(config: RunConfig) -> int:
    """Number of ranks of the policy trainer."""
    return config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node


def has_critic_ranks(config: RunConfig) -> bool:
    """Whether the critic has separate ranks and GPUs; otherwise it shares those of the policy."""
    cluster = config.cluster
    given = cluster.critic_num_nodes is not None or cluster.critic_num_gpus_per_node is not None
    return given and uses_critic(config.algo)


def num_critic_ranks(config: RunConfig) -> int:
    """Number of ranks of a critic on separate GPUs, set or derived."""
    cluster = config.cluster
    nodes = cluster.critic_num_nodes or cluster.actor_num_nodes
    return nodes * (cluster.critic_num_gpus_per_node or cluster.actor_num_gpus_per_node)


def ranks_per_model(config: RunConfig) -> int:
    """Number of ranks that process one micro-batch together: they share the model or its sequences."""
    if config.train.backend == TrainBackendName.fsdp:
        return config.fsdp.context_parallel_size
    megatron = config.megatron
    shared = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return shared * megatron.context_parallel_size


def samples_per_step(config: RunConfig) -> int:
    """Number of samples of an optimiser step, set or derived."""
    batch = config.batch
    # The same derivation as in the resolve step, which runs after the rules.
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    return batch.global_batch_size or samples // (batch.num_steps_per_rollout or 1)
