"""Rules about the critic of ppo. Its keys have no effect with another estimator."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.algo import AdvantageEstimator
from rlscale.config.rules.parallel import STEP
from rlscale.config.rules.rule import (
    CRITIC_RANKS,
    has_critic_ranks,
    num_critic_ranks,
    ranks_per_model,
    rule,
    samples_per_step,
)
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("algo.advantage_estimator", "critic.num_critic_only_steps", "data.num_rollout")
def critic_only_steps_end(config: RunConfig) -> list[Problem]:
    steps, rollouts = config.critic.num_critic_only_steps, config.data.num_rollout
    if config.algo.advantage_estimator != AdvantageEstimator.ppo or not steps or not rollouts or steps < rollouts:
        return []
    rule, fix = f"be less than data.num_rollout={rollouts}", "the policy would never be trained; lower it"
    return [Problem(path="critic.num_critic_only_steps", rule=rule, value=show(steps), fix=fix)]


@rule(*CRITIC_RANKS, "cluster.num_gpus_per_node")
def critic_fits_a_node(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    each, node = cluster.critic_num_gpus_per_node, cluster.num_gpus_per_node
    if not has_critic_ranks(config) or each is None or each <= node:
        return []
    rule, fix = f"be at most cluster.num_gpus_per_node={node}", "set cluster.num_gpus_per_node to what a node has"
    return [Problem(path="cluster.critic_num_gpus_per_node", rule=rule, value=show(each), fix=fix)]


@rule(*CRITIC_RANKS)
def parallel_sizes_divide_the_critic(config: RunConfig) -> list[Problem]:
    """Its ranks share samples as the policy's do."""
    each, ranks = ranks_per_model(config), num_critic_ranks(config)
    if not has_critic_ranks(config) or ranks % each == 0:
        return []
    rule = f"give a multiple of the {each} ranks that take a sample together"
    fix = f"set it and cluster.critic_num_nodes for {-(-ranks // each) * each} ranks, or leave both out"
    return [Problem(path="cluster.critic_num_gpus_per_node", rule=rule, value=f"{ranks} ranks", fix=fix)]


@rule(*CRITIC_RANKS, *STEP)
def batch_divides_among_the_critics_ranks(config: RunConfig) -> list[Problem]:
    """Every data-parallel rank takes the same number of samples of a step, as with the policy's."""
    each, ranks, size = ranks_per_model(config), num_critic_ranks(config), samples_per_step(config)
    if not has_critic_ranks(config) or ranks % each or size % (ranks // each) == 0:
        return []
    parts = ranks // each
    fewer = max(number for number in range(1, parts + 1) if size % number == 0)
    rule = f"give a divisor of the {size} samples of an optimiser step"
    fix = f"set it and cluster.critic_num_nodes for {fewer * each} ranks, or change batch.global_batch_size"
    return [Problem(path="cluster.critic_num_gpus_per_node", rule=rule, value=f"{parts} parts", fix=fix)]


@rule("algo.advantage_estimator", "critic.save", "checkpoint.save")
def critic_is_saved_apart(config: RunConfig) -> list[Problem]:
    save = config.critic.save
    if config.algo.advantage_estimator != AdvantageEstimator.ppo or save is None or save != config.checkpoint.save:
        return []
    rule, fix = f"differ from checkpoint.save={save}", "leave it out for the folder `critic` in it"
    return [Problem(path="critic.save", rule=rule, value=save, fix=fix)]
