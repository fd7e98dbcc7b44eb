"""Rules about the way of the weights to the engines."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.algo import LossType
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("train.update_weights_interval", "rollout.max_staleness", "algo.loss_type")
def interval_keeps_the_bound(config: RunConfig) -> list[Problem]:
    """Between two syncs the trainer moves away from the engines, update by update."""
    interval, staleness = config.train.update_weights_interval, config.rollout.max_staleness
    if config.algo.loss_type == LossType.sft_loss or interval <= staleness + 1:
        return []
    rule = f"be at most rollout.max_staleness + 1 = {staleness + 1}"
    fix = f"set rollout.max_staleness={interval - 1}, as samples between two syncs get that old"
    return [Problem(path="train.update_weights_interval", rule=rule, value=show(interval), fix=fix)]


@rule("train.weight_channel", "cluster.actor_num_nodes", "rollout.engine")
def shared_memory_is_on_one_machine(config: RunConfig) -> list[Problem]:
    if config.train.weight_channel != WeightChannelName.shared_memory:
        return []
    fix = "use train.weight_channel=process_group"
    if config.rollout.engine == EngineKind.external:
        rule = "be another one with rollout.engine=external, whose machine is not known"
        return [Problem(path="train.weight_channel", rule=rule, value="shared_memory", fix=fix)]
    if config.cluster.actor_num_nodes > 1:
        rule = f"be another one with cluster.actor_num_nodes={config.cluster.actor_num_nodes}"
        return [Problem(path="train.weight_channel", rule=rule, value="shared_memory", fix=fix)]
    return []
