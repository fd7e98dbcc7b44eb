"""Rules about which groups are generated, kept and continued."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("sampling.over_sampling_batch_size", "batch.rollout_batch_size")
def pool_holds_a_rollout(config: RunConfig) -> list[Problem]:
    number, least = config.sampling.over_sampling_batch_size, config.batch.rollout_batch_size
    if number is None or number >= least:
        return []
    rule, fix = f"be at least batch.rollout_batch_size={least}", f"set it to {least} or more, or leave it out"
    return [Problem(path="sampling.over_sampling_batch_size", rule=rule, value=show(number), fix=fix)]


@rule("sampling.mask_offpolicy_in_partial_rollout", "sampling.partial_rollout")
def masks_belong_to_partial_rollouts(config: RunConfig) -> list[Problem]:
    if not config.sampling.mask_offpolicy_in_partial_rollout or config.sampling.partial_rollout:
        return []
    rule, fix = "be false without sampling.partial_rollout", "set sampling.partial_rollout=true, or leave it out"
    return [Problem(path="sampling.mask_offpolicy_in_partial_rollout", rule=rule, value="true", fix=fix)]


@rule("sampling.buffer_filter_path", "sampling.partial_rollout")
def buffered_groups_come_from_partial_rollouts(config: RunConfig) -> list[Problem]:
    path = config.sampling.buffer_filter_path
    if path is None or config.sampling.partial_rollout:
        return []
    rule, fix = "be null without sampling.partial_rollout", "nothing is buffered otherwise; set it, or leave this out"
    return [Problem(path="sampling.buffer_filter_path", rule=rule, value=path, fix=fix)]
