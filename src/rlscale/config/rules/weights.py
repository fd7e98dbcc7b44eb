"""Rules about the weight sync between trainer and engines."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.rules.conditions import is_sft, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def sync_interval_keeps_the_staleness_bound(config: RunConfig) -> list[Problem]:
    """Between two weight syncs samples get older by one update per rollout."""
    interval, staleness = config.train.update_weights_interval, config.rollout.max_staleness
    if is_sft(config) or interval <= staleness + 1:
        return []
    # Rollout r is trained as update r, so each rollout between two syncs adds one update of age.
    rule = f"be at most rollout.max_staleness + 1 = {staleness + 1}"
    fix = f"set rollout.max_staleness={interval - 1}, the age that samples reach between two weight syncs"
    return [Problem(path="train.update_weights_interval", rule=rule, value=show(interval), fix=fix)]


@rule
def shared_memory_needs_one_machine(config: RunConfig) -> list[Problem]:
    if config.train.weight_channel != WeightChannelName.shared_memory:
        return []
    path, others = "train.weight_channel", "process_group, disk or delta"
    if config.rollout.engine == EngineKind.external:
        rule = f"be {others} with rollout.engine=external"
        fix = "use train.weight_channel=process_group; the servers may be on other machines"
        return [Problem(path=path, rule=rule, value="shared_memory", fix=fix)]
    if config.cluster.actor_num_nodes > 1:
        rule = f"be {others} with cluster.actor_num_nodes={config.cluster.actor_num_nodes}"
        fix = "use train.weight_channel=process_group"
        return [Problem(path=path, rule=rule, value="shared_memory", fix=fix)]
    return []


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("train.weight_folder",),
        when=lambda config: config.train.weight_channel not in (WeightChannelName.disk, WeightChannelName.delta),
        why="train.weight_channel is neither disk nor delta",
    ),
    IgnoredKey(
        names=(
            "train.weight_channel",
            "train.weight_folder",
            "train.update_weights_interval",
            "train.update_weight_buffer_size",
        ),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so no engine needs weights",
    ),
)
