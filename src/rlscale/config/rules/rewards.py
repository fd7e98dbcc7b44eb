"""Rules about rewards that come from elsewhere, of whole groups, or with several numbers."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.reward import RewardType
from rlscale.config.rules.rule import USES_ENGINES, rule, uses_engines
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("reward.group", "eval.interval")
def groups_are_not_evaluated(config: RunConfig) -> list[Problem]:
    """An evaluated prompt has no group to be compared with."""
    if not config.reward.group or config.eval.interval is None:
        return []
    rule, fix = f"be false with eval.interval={config.eval.interval}", "set eval.interval=null, or score single samples"
    return [Problem(path="reward.group", rule=rule, value="true", fix=fix)]


@rule("reward.type", "reward.custom_path", "reward.url", *USES_ENGINES)
def remote_reward_has_an_address(config: RunConfig) -> list[Problem]:
    reward = config.reward
    asks = reward.type == RewardType.remote_rm and reward.custom_path is None and uses_engines(config)
    if not asks or reward.url is not None:
        return []
    fix = "set it to the server's address, e.g. reward.url=http://10.0.0.1:8000"
    return [Problem(path="reward.url", rule="be set with reward.type=remote_rm", value="null", fix=fix)]


@rule("reward.type", "reward.custom_path", "reward.key", *USES_ENGINES)
def named_rewards_have_a_key(config: RunConfig) -> list[Problem]:
    """`dapo` gives several numbers by name, of which one is trained on."""
    reward = config.reward
    several = reward.type == RewardType.dapo and reward.custom_path is None and uses_engines(config)
    if not several or reward.key is not None:
        return []
    fix = "set reward.key=score"
    return [Problem(path="reward.key", rule="be set with reward.type=dapo", value="null", fix=fix)]


@rule("reward.url", "reward.type", "reward.custom_path")
def reward_address_is_a_url(config: RunConfig) -> list[Problem]:
    reward, url = config.reward, config.reward.url
    is_used = reward.type == RewardType.remote_rm or reward.custom_path is not None
    if url is None or not is_used or url.startswith(("http://", "https://")):
        return []
    return [
        Problem(path="reward.url", rule="begin with http:// or https://", value=show(url), fix=f"write http://{url}")
    ]


@rule("reward.type", "reward.custom_path", "reward.key", "eval.reward_key", *USES_ENGINES)
def single_rewards_have_no_key(config: RunConfig) -> list[Problem]:
    """Of a reward that is one number, none can be chosen by name."""
    reward = config.reward
    several = (None, RewardType.dapo, RewardType.remote_rm)
    if reward.custom_path is not None or reward.type in several or not uses_engines(config):
        return []
    rule, fix = f"be null with reward.type={reward.type}", "it gives one number; leave it out"
    named = {"reward.key": reward.key, "eval.reward_key": config.eval.reward_key}
    if config.eval.interval is None:
        del named["eval.reward_key"]  # without effect
    return [Problem(path=path, rule=rule, value=key, fix=fix) for path, key in named.items() if key is not None]
