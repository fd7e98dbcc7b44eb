"""Rules about rewards, evaluation and exports."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.algo import LossType
from rlscale.config.groups.reward import RewardType
from rlscale.config.resolve.eval_sets import eval_sets
from rlscale.config.rules.rule import USES_ENGINES, rule, uses_engines
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem


@rule("reward.type", "reward.custom_path", *USES_ENGINES)
def samples_are_scored(config: RunConfig) -> list[Problem]:
    reward = config.reward
    if reward.type is not None or reward.custom_path is not None or not uses_engines(config):
        return []
    fix = "choose reward=exact_match or reward=math, or set reward.custom_path=<package.module:name>"
    return [Problem(path="reward.type", rule="name a reward", value="null", fix=fix)]


@rule("reward.type", "reward.custom_path", "data.label_key", "eval.label_key", *USES_ENGINES)
def reward_has_labels(config: RunConfig) -> list[Problem]:
    """Every reward that comes with rlscale, except the coin, compares with a label."""
    reward, labels = config.reward, config.data.label_key
    if config.algo.loss_type == LossType.sft_loss:
        labels = config.eval.label_key or labels  # only evaluations are scored
    own = reward.custom_path is not None or reward.type in (None, RewardType.random)
    if own or labels is not None or not uses_engines(config):
        return []
    fix = "set it to the field that holds the answer"
    return [Problem(path="data.label_key", rule=f"be set with reward.type={reward.type}", value="null", fix=fix)]


@rule("eval.interval", "eval.prompt_data", "eval.config")
def evaluation_has_data(config: RunConfig) -> list[Problem]:
    evaluation = config.eval
    if evaluation.interval is None or evaluation.prompt_data is not None or evaluation.config is not None:
        return []
    fix = "set it to [<name>, <file>], or choose eval=arithmetic"
    return [Problem(path="eval.prompt_data", rule="be set with eval.interval", value="null", fix=fix)]


@rule("eval.prompt_data")
def eval_sets_are_pairs(config: RunConfig) -> list[Problem]:
    entries = config.eval.prompt_data
    if entries is None or len(entries) == 1:
        return []
    if len(entries) % 2:
        fix = "write [name, file, name, file]"
        return [Problem(path="eval.prompt_data", rule="hold pairs of name and file", value=show(entries), fix=fix)]
    names = entries[::2]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not twice:
        return []
    fix = f"rename {', '.join(twice)}"
    return [Problem(path="eval.prompt_data", rule="give each set its own name", value=show(entries), fix=fix)]


@rule("eval.config")
def eval_file_is_right(config: RunConfig) -> list[Problem]:
    """The file of `eval.config` can be read, and every set in it has a name, a file, and values as the group's own."""
    if config.eval.config is None:
        return []
    try:
        eval_sets(config.eval)
    except ConfigError as error:
        return list(error.problems)
    return []


@rule("eval.stop_reward", "eval.interval")
def stop_reward_is_measured(config: RunConfig) -> list[Problem]:
    if config.eval.stop_reward is None or config.eval.interval is not None:
        return []
    value = show(config.eval.stop_reward)
    return [
        Problem(path="eval.stop_reward", rule="be null without eval.interval", value=value, fix="set eval.interval")
    ]


@rule("checkpoint.save_hf")
def export_path_is_a_template(config: RunConfig) -> list[Problem]:
    return _wants_rollout_id("checkpoint.save_hf", config.checkpoint.save_hf, "exports/{rollout_id}")


@rule("debug.save_rollout_data")
def dump_path_is_a_template(config: RunConfig) -> list[Problem]:
    return _wants_rollout_id("debug.save_rollout_data", config.debug.save_rollout_data, "dumps/{rollout_id}.jsonl")


def _wants_rollout_id(key: str, template: str | None, example: str) -> list[Problem]:
    if template is None or "{rollout_id}" in template:
        return []
    fix = f"each rollout would overwrite the one before; write e.g. {example}"
    return [Problem(path=key, rule="contain {rollout_id}", value=template, fix=fix)]
