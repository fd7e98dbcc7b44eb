"""Check of the rewards that rows name: `rm_type` of their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.config import RunConfig
from rlscale.config.groups.reward import RewardType
from rlscale.config.problems import nearest
from rlscale.config.rules import scores_samples
from rlscale.config.rules.rewards import REMOTE_REWARDS
from rlscale.data.first_rows import CheckMetadata
from rlscale.data.row_values import REWARD
from rlscale.data.rows import Row


def row_reward_check(config: RunConfig) -> CheckMetadata | None:
    """The check of the metadata of each row; None: the run does not use the rewards that rows name."""
    reward = config.reward
    if reward.custom_path is not None or reward.functions or not scores_samples(config):
        return None
    has_url, has_engines = reward.url is not None, bool(reward.engine.num_gpus)

    def check(row: Row, metadata: Mapping[str, Any]) -> None:
        value = metadata.get(REWARD)
        name = "" if value is None else str(value).strip()
        if name and name not in list(RewardType):
            near = nearest(name, list(RewardType))
            rule = f"name a built-in reward as metadata.{REWARD}, got {name!r}"
            fix = f"did you mean {near}?" if near else f"one of {', '.join(RewardType)}"
        elif name in REMOTE_REWARDS and not has_url:
            rule, fix = f"name no {name} as metadata.{REWARD} without reward.url, got {name!r}", "set reward.url"
        elif name == RewardType.judge and not has_engines:
            rule = f"name no judge as metadata.{REWARD} without reward.engine.num_gpus, got {name!r}"
            fix = "set reward.engine.num_gpus=1"
        else:
            return
        raise row.error(f"{rule}; {fix}", reason=f"no reward for its {REWARD}")

    return check
