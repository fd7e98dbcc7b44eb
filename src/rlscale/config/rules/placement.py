"""Rules about nodes and GPUs."""

from __future__ import annotations

from rlscale.config.problems import show
from rlscale.config.rollout import EngineKind
from rlscale.config.rules.rule import USES_ENGINES, rule, uses_engines
from rlscale.config.run import RunConfig
from rlscale.errors import Problem


@rule("cluster.actor_num_gpus_per_node", "cluster.num_gpus_per_node")
def trainer_fits_a_node(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    if cluster.actor_num_gpus_per_node <= cluster.num_gpus_per_node:
        return []
    rule = f"be at most cluster.num_gpus_per_node={cluster.num_gpus_per_node}"
    value = show(cluster.actor_num_gpus_per_node)
    fix = "set cluster.num_gpus_per_node to what a node has"
    return [Problem(path="cluster.actor_num_gpus_per_node", rule=rule, value=value, fix=fix)]


@rule("cluster.rollout_num_gpus", "cluster.colocate", *USES_ENGINES)
def engines_have_gpus(config: RunConfig) -> list[Problem]:
    number = config.cluster.rollout_num_gpus
    if not uses_engines(config) or number or (number is None and config.cluster.colocate):
        return []
    fix = "set it, e.g. cluster.rollout_num_gpus=1, or share the trainer's GPUs with cluster.colocate=true"
    return [Problem(path="cluster.rollout_num_gpus", rule="be at least 1", value=show(number), fix=fix)]


@rule(
    "cluster.rollout_num_gpus",
    "cluster.rollout_num_gpus_per_engine",
    "cluster.colocate",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
    "rollout.engine",
)
def engines_divide_gpus(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    each = cluster.rollout_num_gpus_per_engine
    number = cluster.rollout_num_gpus
    if number is None and cluster.colocate:
        number = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    problems = []
    if config.rollout.engine == EngineKind.embedded and each != 1:
        rule = "be 1 with rollout.engine=embedded"
        problems.append(Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(each)))
    if number is not None and number % each:
        rule = f"divide the {number} GPUs of all engines"
        fix = f"set it to 1, or cluster.rollout_num_gpus={number // each * each + each}"
        problems.append(Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(each), fix=fix))
    return problems
