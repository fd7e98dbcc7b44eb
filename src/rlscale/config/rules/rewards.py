"""Rules about rewards, evaluation and exports."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.reward import RewardType
from rlscale.config.keys import keys
from rlscale.config.resolve.eval_sets import read_eval_file
from rlscale.config.rules.conditions import is_sft, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem


@rule
def group_rewards_exclude_evaluation(config: RunConfig) -> list[Problem]:
    """An evaluated prompt has no group."""
    if not config.reward.group or config.eval.interval is None:
        return []
    rule, fix = f"be false with eval.interval={config.eval.interval}", "set eval.interval=null, or score single samples"
    return [Problem(path="reward.group", rule=rule, value="true", fix=fix)]


@rule
def remote_reward_has_a_url(config: RunConfig) -> list[Problem]:
    reward = config.reward
    is_remote = reward.type == RewardType.remote_rm and reward.custom_path is None and uses_engines(config)
    if not is_remote or reward.url is not None:
        return []
    fix = "set it to the URL of the server, e.g. reward.url=http://10.0.0.1:8000"
    return [Problem(path="reward.url", rule="be set with reward.type=remote_rm", value="null", fix=fix)]


@rule
def dapo_reward_has_a_key(config: RunConfig) -> list[Problem]:
    """`dapo` returns several named values, and training uses one of them."""
    reward = config.reward
    several = reward.type == RewardType.dapo and reward.custom_path is None and uses_engines(config)
    if not several or reward.key is not None:
        return []
    return [Problem(path="reward.key", rule="be set with reward.type=dapo", value="null", fix="set reward.key=score")]


@rule
def reward_url_has_a_scheme(config: RunConfig) -> list[Problem]:
    reward, url = config.reward, config.reward.url
    is_used = reward.type == RewardType.remote_rm or reward.custom_path is not None
    if url is None or not is_used or url.startswith(("http://", "https://")):
        return []
    return [
        Problem(path="reward.url", rule="begin with http:// or https://", value=show(url), fix=f"write http://{url}")
    ]


@rule
def single_rewards_have_no_key(config: RunConfig) -> list[Problem]:
    """A reward that returns a single number has no named values."""
    reward = config.reward
    # These rewards can return several named values.
    several = (None, RewardType.dapo, RewardType.remote_rm)
    if reward.custom_path is not None or reward.type in several or not uses_engines(config):
        return []
    rule, fix = f"be null with reward.type={reward.type}", "remove it; this reward returns a single number"
    named = {"reward.key": reward.key}
    # Without evaluations the key has no effect, and a warning reports it.
    if config.eval.interval is not None:
        named["eval.reward_key"] = config.eval.reward_key
    return [Problem(path=path, rule=rule, value=key, fix=fix) for path, key in named.items() if key is not None]


@rule
def reward_is_set(config: RunConfig) -> list[Problem]:
    reward = config.reward
    if reward.type is not None or reward.custom_path is not None or not uses_engines(config):
        return []
    fix = "choose reward=exact_match or reward=math, or set reward.custom_path=<package.module:name>"
    return [Problem(path="reward.type", rule="be set with reward.custom_path=null", value="null", fix=fix)]


@rule
def reward_has_labels(config: RunConfig) -> list[Problem]:
    """Every built-in reward except `random` compares with a label."""
    reward, labels = config.reward, config.data.label_key
    if is_sft(config):
        labels = config.eval.label_key or labels  # only evaluations are scored
    needs_no_label = reward.custom_path is not None or reward.type in (None, RewardType.random)
    if needs_no_label or labels is not None or not uses_engines(config):
        return []
    rule, fix = f"be set with reward.type={reward.type}", "set it to the field with the answer"
    return [Problem(path="data.label_key", rule=rule, value="null", fix=fix)]


@rule
def evaluation_has_data(config: RunConfig) -> list[Problem]:
    evaluation = config.eval
    if evaluation.interval is None or evaluation.prompt_data is not None or evaluation.config is not None:
        return []
    fix = "set it to [<name>, <file>], or choose eval=arithmetic"
    return [Problem(path="eval.prompt_data", rule="be set with eval.interval", value="null", fix=fix)]


@rule
def eval_sets_are_pairs(config: RunConfig) -> list[Problem]:
    entries, path = config.eval.prompt_data, "eval.prompt_data"
    if entries is None or len(entries) == 1:
        return []
    if len(entries) % 2:
        rule, fix = "contain pairs of name and file", "write [name, file, name, file]"
        return [Problem(path=path, rule=rule, value=show(entries), fix=fix)]
    # Names and files alternate.
    names = entries[::2]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not twice:
        return []
    rule, fix = "give each set a unique name", f"rename {', '.join(twice)}"
    return [Problem(path=path, rule=rule, value=show(entries), fix=fix)]


@rule
def eval_file_is_valid(config: RunConfig) -> list[Problem]:
    """The file of `eval.config` is readable, and each of its sets has a name, a file and valid settings."""
    if config.eval.config is None:
        return []
    try:
        read_eval_file(config.eval.config)
    except ConfigError as error:
        return list(error.problems)
    return []


@rule
def stop_reward_needs_evaluation(config: RunConfig) -> list[Problem]:
    if config.eval.stop_reward is None or config.eval.interval is not None:
        return []
    value, fix = show(config.eval.stop_reward), "set eval.interval, or remove it"
    return [Problem(path="eval.stop_reward", rule="be null without eval.interval", value=value, fix=fix)]


@rule
def export_path_is_a_template(config: RunConfig) -> list[Problem]:
    path = config.checkpoint.save_hf
    if path is None or "{rollout_id}" in path:
        return []
    fix = "write e.g. exports/{rollout_id}; otherwise each export overwrites the one before"
    return [Problem(path="checkpoint.save_hf", rule="contain {rollout_id}", value=path, fix=fix)]


EVAL_DATA = ("eval.prompt_data", "eval.config")

IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("eval.") and path not in EVAL_DATA),
        when=lambda config: config.eval.prompt_data is None and config.eval.config is None,
        why="neither eval.prompt_data nor eval.config is set",
    ),
    IgnoredKey(
        names=("eval.prompt_data",),
        when=lambda config: config.eval.config is not None,
        why="eval.config is set and takes precedence",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("eval.") and path != "eval.interval"),
        when=lambda config: config.eval.interval is None,
        why="eval.interval is not set",
    ),
    IgnoredKey(
        names=("eval.num_batches",),
        when=lambda config: not is_sft(config),
        why="algo.loss_type is not sft_loss",
    ),
    IgnoredKey(
        names=("eval",),
        when=lambda config: config.debug.train_only or config.debug.load_rollout_data is not None,
        why="there are no engines, by debug.train_only or debug.load_rollout_data",
    ),
    IgnoredKey(
        names=("reward.url",),
        when=lambda config: config.reward.type != RewardType.remote_rm and config.reward.custom_path is None,
        why="reward.type is not remote_rm",
    ),
    IgnoredKey(
        names=("reward",),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so there is nothing to score",
    ),
    IgnoredKey(
        names=("reward.type",),
        when=lambda config: config.reward.custom_path is not None,
        why="reward.custom_path is set and takes precedence",
    ),
)
