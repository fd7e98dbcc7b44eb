"""Rules about the critic of ppo. Its keys have no effect with another estimator."""

from __future__ import annotations

from rlscale.config.algo import AdvantageEstimator
from rlscale.config.problems import show
from rlscale.config.rules.rule import rule
from rlscale.config.run import RunConfig
from rlscale.errors import Problem


@rule("algo.advantage_estimator", "critic.num_critic_only_steps", "data.num_rollout")
def critic_only_steps_end(config: RunConfig) -> list[Problem]:
    steps, rollouts = config.critic.num_critic_only_steps, config.data.num_rollout
    if config.algo.advantage_estimator != AdvantageEstimator.ppo or not steps or not rollouts or steps < rollouts:
        return []
    rule, fix = f"be less than data.num_rollout={rollouts}", "the policy would never be trained; lower it"
    return [Problem(path="critic.num_critic_only_steps", rule=rule, value=show(steps), fix=fix)]


@rule(
    "algo.advantage_estimator",
    "cluster.critic_num_nodes",
    "cluster.critic_num_gpus_per_node",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
)
def critic_has_the_policys_gpus(config: RunConfig) -> list[Problem]:
    """Policy and critic take turns on the same GPUs, rank by rank."""
    if config.algo.advantage_estimator != AdvantageEstimator.ppo:
        return []
    problems = []
    for name in ("num_nodes", "num_gpus_per_node"):
        own, policys = getattr(config.cluster, f"critic_{name}"), getattr(config.cluster, f"actor_{name}")
        if own is not None and own != policys:
            rule, fix = f"be cluster.actor_{name}={policys}", "leave it out: the critic has the policy's GPUs"
            problems.append(Problem(path=f"cluster.critic_{name}", rule=rule, value=show(own), fix=fix))
    return problems


@rule("algo.advantage_estimator", "critic.save", "checkpoint.save")
def critic_is_saved_apart(config: RunConfig) -> list[Problem]:
    save = config.critic.save
    if config.algo.advantage_estimator != AdvantageEstimator.ppo or save is None or save != config.checkpoint.save:
        return []
    rule, fix = f"differ from checkpoint.save={save}", "leave it out for the folder `critic` in it"
    return [Problem(path="critic.save", rule=rule, value=save, fix=fix)]
