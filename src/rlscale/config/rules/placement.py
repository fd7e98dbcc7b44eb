"""Rules about nodes and GPUs."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.algo import LossType
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.keys import keys
from rlscale.config.rules.rule import EXTERNAL, USES_ENGINES, are_external, rule, uses_engines
from rlscale.config.run_config import RunConfig
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


@rule("cluster.colocate", "cluster.actor_num_gpus_per_node", "cluster.num_gpus_per_node")
def small_nodes_are_said(config: RunConfig) -> list[Problem]:
    """Shared GPUs are counted node by node, so a node with fewer than 8 must be known to have fewer."""
    cluster, unsaid = config.cluster, keys()["cluster.num_gpus_per_node"].default
    each = cluster.actor_num_gpus_per_node
    if not cluster.colocate or cluster.num_gpus_per_node != unsaid or each >= unsaid:
        return []
    rule = f"be {each} with cluster.colocate and cluster.actor_num_gpus_per_node={each}"
    fix = f"set cluster.num_gpus_per_node={each}, or use all {unsaid} GPUs of a node"
    return [Problem(path="cluster.num_gpus_per_node", rule=rule, value=show(unsaid), fix=fix)]


@rule("cluster.offload", "cluster.offload_train", "cluster.offload_rollout")
def offload_is_both(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    return [
        Problem(path=f"cluster.{name}", rule="not be false with cluster.offload", value="false", fix="drop one of them")
        for name in ("offload_train", "offload_rollout")
        if cluster.offload and getattr(cluster, name) is False
    ]


@rule(
    "cluster.rollout_num_gpus_per_engine",
    "cluster.num_gpus_per_node",
    "cluster.rollout_num_gpus",
    "rollout.engine",
    *USES_ENGINES,
)
def engines_fill_nodes(config: RunConfig) -> list[Problem]:
    """An engine lies on one node, or on several whole ones."""
    cluster = config.cluster
    each, node = cluster.rollout_num_gpus_per_engine, cluster.num_gpus_per_node
    total = cluster.rollout_num_gpus or each
    is_whole = each % node == 0 if each > node else total <= node or node % each == 0
    if is_whole or not uses_engines(config) or config.rollout.engine != EngineKind.sglang:
        return []
    smaller = max(size for size in range(1, node + 1) if node % size == 0 and size <= each)
    near = (smaller, -(-each // node) * node)
    rule = f"divide cluster.num_gpus_per_node={node}, or be a multiple of it"
    fix = f"set it to {' or '.join(map(str, near))}"
    return [Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(each), fix=fix)]


@rule("cluster.rollout_num_gpus", "cluster.colocate", "rollout.external", "rollout.engine", *USES_ENGINES)
def engines_have_gpus(config: RunConfig) -> list[Problem]:
    """Those of servers that run already are theirs."""
    number = config.cluster.rollout_num_gpus
    if config.rollout.external or config.rollout.engine == EngineKind.external:
        return []
    if not uses_engines(config) or number or (number is None and config.cluster.colocate):
        return []
    fix = "set it, e.g. cluster.rollout_num_gpus=1, or share the trainer's GPUs with cluster.colocate=true"
    return [Problem(path="cluster.rollout_num_gpus", rule="be at least 1", value=show(number), fix=fix)]


RESTING = ("cluster.offload", "cluster.offload_rollout", "cluster.colocate", *USES_ENGINES)
"""Keys that say whether engines give back their memory while the trainer works."""


def engines_rest(config: RunConfig) -> bool:
    """Whether engines give back their memory while the trainer works, given or derived."""
    cluster = config.cluster
    given = cluster.offload_rollout
    return uses_engines(config) and (given if given is not None else cluster.offload or cluster.colocate)


@rule("rollout.max_staleness", *RESTING)
def resting_engines_are_given_weights(config: RunConfig) -> list[Problem]:
    """An engine that gave back its memory generates nothing, and then has no weights but those it is sent."""
    if not engines_rest(config) or config.cluster.colocate:
        return []  # with cluster.colocate another rule says so
    rule = "be 0 with cluster.offload_rollout"
    fix = "engines without memory generate nothing ahead; set it to 0, or cluster.offload_rollout=false"
    staleness = config.rollout.max_staleness
    return [Problem(path="rollout.max_staleness", rule=rule, value=show(staleness), fix=fix)] if staleness else []


@rule("train.weight_channel", *RESTING)
def resting_engines_are_given_all_weights(config: RunConfig) -> list[Problem]:
    if not engines_rest(config) or config.train.weight_channel != WeightChannelName.delta:
        return []
    rule = "be another one with cluster.offload_rollout"
    fix = "an engine that gave back its memory has no weights to change; set cluster.offload_rollout=false"
    return [Problem(path="train.weight_channel", rule=rule, value="delta", fix=fix)]


@rule("rollout.max_staleness", "cluster.colocate", "algo.loss_type")
def shared_gpus_take_turns(config: RunConfig) -> list[Problem]:
    staleness = config.rollout.max_staleness
    if not config.cluster.colocate or staleness == 0 or config.algo.loss_type == LossType.sft_loss:
        return []
    fix = (
        "trainers and engines on the same GPUs take turns, so nothing can be generated ahead; "
        "set rollout.max_staleness=0, or cluster.colocate=false with GPUs of their own (cluster.rollout_num_gpus)"
    )
    return [Problem(path="rollout.max_staleness", rule="be 0 with cluster.colocate", value=show(staleness), fix=fix)]


@rule(
    "cluster.rollout_num_gpus",
    "cluster.rollout_num_gpus_per_engine",
    "cluster.colocate",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
    "rollout.engine",
    "sglang.server_args",
)
def engines_divide_gpus(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    each = cluster.rollout_num_gpus_per_engine
    number = cluster.rollout_num_gpus
    if number is None and cluster.colocate:
        number = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    problems = _pipeline_problems(config)
    if config.rollout.engine == EngineKind.embedded and each != 1:
        rule = "be 1 with rollout.engine=embedded"
        fix = "it runs on one GPU; set it to 1, or choose rollout=sglang"
        problems.append(Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(each), fix=fix))
    if number is not None and number % each:
        rule = f"divide the {number} GPUs of all engines"
        fix = f"set it to 1, or cluster.rollout_num_gpus={number // each * each + each}"
        problems.append(Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(each), fix=fix))
    return problems


def _pipeline_problems(config: RunConfig) -> list[Problem]:
    """SGLang spreads the GPUs of an engine over stages and, within each, over ranks of tensor parallelism."""
    stages, each = config.sglang.server_args.get("pp_size", 1), config.cluster.rollout_num_gpus_per_engine
    if config.rollout.engine != EngineKind.sglang or (stages > 0 and each % stages == 0):
        return []
    rule = f"be a positive divisor of cluster.rollout_num_gpus_per_engine={each}"
    fix = f"set it to {max(size for size in range(1, each + 1) if each % size == 0 and size <= max(stages, 1))}"
    return [Problem(path="sglang.pp_size", rule=rule, value=show(stages), fix=fix)]


USES_ROUTER = (
    "router.enabled",
    *EXTERNAL,
    "cluster.rollout_num_gpus",
    "cluster.rollout_num_gpus_per_engine",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
    "algo.use_rollout_routing_replay",
    *USES_ENGINES,
)
"""Keys that `uses_router` reads."""


def uses_router(config: RunConfig) -> bool:
    """Whether generation goes through sglang-router."""
    if not uses_engines(config) or config.router.enabled is False or are_external(config):
        return False
    cluster = config.cluster
    number = cluster.rollout_num_gpus
    if number is None:
        number = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    # sglang-router would drop the request for routes.
    several = number > cluster.rollout_num_gpus_per_engine and not config.algo.use_rollout_routing_replay
    return config.router.enabled is True or (several and config.rollout.engine == EngineKind.sglang)
