"""Rules about the critic of ppo. Its keys have no effect with other estimators."""

from __future__ import annotations

from rlscale.config.groups.algo import AdvantageEstimator, uses_critic
from rlscale.config.problems import show
from rlscale.config.rules.conditions import has_critic_ranks, num_critic_ranks, ranks_per_model, samples_per_step
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def critic_fits_a_node(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    given, node = cluster.critic_num_gpus_per_node, cluster.num_gpus_per_node
    if not has_critic_ranks(config) or given is None or given <= node:
        return []
    rule, fix = f"be at most cluster.num_gpus_per_node={node}", "set cluster.num_gpus_per_node to the GPUs of a node"
    return [Problem(path="cluster.critic_num_gpus_per_node", rule=rule, value=show(given), fix=fix)]


@rule
def parallel_sizes_divide_critic_ranks(config: RunConfig) -> list[Problem]:
    """Critic ranks share samples in the same way as policy ranks."""
    shared, ranks = ranks_per_model(config), num_critic_ranks(config)
    if not has_critic_ranks(config) or ranks % shared == 0:
        return []
    rule = f"make the number of critic ranks a multiple of {shared}, the ranks that share a sample"
    # -(-a // b) * b rounds a up to a multiple of b.
    fix = f"set it and cluster.critic_num_nodes for {-(-ranks // shared) * shared} ranks, or remove both"
    return [Problem(path="cluster.critic_num_gpus_per_node", rule=rule, value=f"{ranks} ranks", fix=fix)]


@rule
def every_critic_rank_has_a_sample(config: RunConfig) -> list[Problem]:
    """As for the policy: a rank may get fewer samples of a step than another, but not none in every step."""
    shared, ranks, size = ranks_per_model(config), num_critic_ranks(config), samples_per_step(config)
    parts = ranks // shared
    # More steps than samples leave none; another rule reports it.
    if not has_critic_ranks(config) or ranks % shared or size >= parts or size == 0:
        return []
    rule = f"make the number of data-parallel critic ranks at most {size}, the samples of an optimiser step"
    fix = f"set it and cluster.critic_num_nodes for {size * shared} ranks, or set a larger batch.global_batch_size"
    value = f"{parts} data-parallel ranks"
    return [Problem(path="cluster.critic_num_gpus_per_node", rule=rule, value=value, fix=fix)]


@rule
def critic_has_a_separate_folder(config: RunConfig) -> list[Problem]:
    save = config.critic.save
    if config.algo.advantage_estimator != AdvantageEstimator.ppo or save is None or save != config.checkpoint.save:
        return []
    rule, fix = f"differ from checkpoint.save={save}", "remove it to use the subfolder `critic` of each checkpoint"
    return [Problem(path="critic.save", rule=rule, value=save, fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("critic", "cluster.critic_num_nodes", "cluster.critic_num_gpus_per_node"),
        when=lambda config: not uses_critic(config.algo),
        why="there is no critic: only algo.advantage_estimator=ppo has one, without advantages of your own",
    ),
)
