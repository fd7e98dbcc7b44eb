"""Rules about rewards, evaluation and exports."""

from __future__ import annotations

import math

from rlscale.config.addresses import advise_url, public_url
from rlscale.config.groups.algo import LossType, uses_teacher
from rlscale.config.groups.reward import RewardType, has_zero_reward
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.resolve.eval_file import read_eval_file
from rlscale.config.rules.conditions import builtin_rewards, is_sft, scores_samples, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem

DAPO_REWARDS = (RewardType.dapo, RewardType.boxed_dapo)
REMOTE_REWARDS = (RewardType.remote_rm, RewardType.boxed_remote_rm)
WITHOUT_LABELS = (
    *(RewardType.random, RewardType.boxed_random, RewardType.judge, RewardType.ifbench, RewardType.boxed_ifbench),
    RewardType.zero,
    *REMOTE_REWARDS,
)


def is_single(config: RunConfig) -> bool:
    """Whether `reward.type` scores the samples, or must be set for that."""
    reward = config.reward
    return reward.custom_path is None and not reward.functions and scores_samples(config)


@rule
def group_rewards_exclude_evaluation(config: RunConfig) -> list[Problem]:
    """An evaluated prompt has no group."""
    if not config.reward.group or config.eval.interval is None:
        return []
    rule, fix = f"be false with eval.interval={config.eval.interval}", "set eval.interval=null, or score single samples"
    return [Problem(path="reward.group", rule=rule, value="true", fix=fix)]


@rule
def group_reward_is_custom(config: RunConfig) -> list[Problem]:
    """Built-in rewards score single samples."""
    reward = config.reward
    if not reward.group or not is_single(config):
        return []
    rule, fix = "be false with a built-in reward", "remove it, or set reward.custom_path=<package.module:name>"
    return [Problem(path="reward.group", rule=rule, value="true", fix=fix)]


@rule
def remote_reward_has_a_url(config: RunConfig) -> list[Problem]:
    reward = config.reward
    remote = {key: name for key, name in builtin_rewards(config).items() if name in REMOTE_REWARDS}
    if not remote or reward.url is not None or not uses_engines(config):
        return []
    key, name = next(iter(remote.items()))
    fix = "set it to the URL of the server, e.g. reward.url=http://10.0.0.1:8000"
    return [Problem(path="reward.url", rule=f"be set with {key}={name}", value="null", fix=fix)]


@rule
def dapo_reward_has_a_key(config: RunConfig) -> list[Problem]:
    """`dapo` returns several named values, and training uses one of them."""
    reward = config.reward
    several = reward.type in DAPO_REWARDS and is_single(config)
    if not several or reward.key is not None:
        return []
    rule = f"be set with reward.type={reward.type}"
    return [Problem(path="reward.key", rule=rule, value="null", fix="set reward.key=score")]


@rule
def dapo_reward_has_the_value(config: RunConfig) -> list[Problem]:
    """`reward.key` is a number that `dapo` returns: `pred` is a text."""
    reward = config.reward
    if reward.type not in DAPO_REWARDS or not is_single(config) or reward.key in (None, "score", "acc"):
        return []
    rule = f"be score or acc with reward.type={reward.type}"
    return [Problem(path="reward.key", rule=rule, value=reward.key, fix="set reward.key=score")]


@rule
def reward_url_is_a_url(config: RunConfig) -> list[Problem]:
    url = config.reward.url
    fix = None if url is None else advise_url(url, example="http://10.0.0.1:8000/score")
    if url is None or fix is None:
        return []
    rule = "be the URL of a server, http://<host>:<port>/<path> or https://..."
    return [Problem(path="reward.url", rule=rule, value=public_url(url), fix=fix)]


@rule
def single_rewards_have_no_key(config: RunConfig) -> list[Problem]:
    """A reward that returns a single number has no named values."""
    reward = config.reward
    # These rewards can return several named values.
    several = (None, *DAPO_REWARDS, *REMOTE_REWARDS)
    if reward.type in several or not is_single(config):
        return []
    rule, fix = f"be null with reward.type={reward.type}", "remove it; this reward returns a single number"
    named = {"reward.key": reward.key}
    # Without evaluations the key has no effect, and a warning reports it.
    if config.eval.interval is not None:
        named["eval.reward_key"] = config.eval.reward_key
    return [Problem(path=path, rule=rule, value=key, fix=fix) for path, key in named.items() if key is not None]


@rule
def reward_key_excludes_weights(config: RunConfig) -> list[Problem]:
    """One named value is trained on, or the weighted sum of several."""
    reward = config.reward
    if not reward.weights or reward.key is None or not uses_engines(config):
        return []
    return [Problem(path="reward.key", rule="be null with reward.weights", value=reward.key, fix="set one of the two")]


@rule
def reward_weights_are_finite(config: RunConfig) -> list[Problem]:
    weights = config.reward.weights
    if not uses_engines(config) or all(math.isfinite(weight) for weight in weights.values()):
        return []
    rule, fix = "contain finite numbers", "correct it"
    return [Problem(path="reward.weights", rule=rule, value=show(weights), fix=fix)]


@rule
def weighted_rewards_are_named(config: RunConfig) -> list[Problem]:
    """Built-in rewards return one number; a reward server or user code may return several."""
    reward = config.reward
    single = is_single(config) and reward.type not in (None, *REMOTE_REWARDS)
    if not reward.weights or not single:
        return []
    rule, fix = f"be empty with reward.type={reward.type}", "remove it, or set reward.custom_path=<package.module:name>"
    return [Problem(path="reward.weights", rule=rule, value=show(reward.weights), fix=fix)]


@rule
def reward_is_set(config: RunConfig) -> list[Problem]:
    """A generate function may set the reward of each of its samples, as slime's do."""
    reward = config.reward
    is_graded = config.sampling.custom_generate_function_path is not None
    if reward.type is not None or not is_single(config) or is_graded:
        return []
    fix = "choose reward=exact_match or reward=math, or set reward.custom_path=<package.module:name>"
    return [Problem(path="reward.type", rule="be set with reward.custom_path=null", value="null", fix=fix)]


@rule
def zero_reward_has_a_teacher(config: RunConfig) -> list[Problem]:
    """Samples that all have the reward 0 teach nothing by themselves."""
    algo, reward = config.algo, config.reward
    others = (algo.custom_advantage_function_path, reward.post_process_path, config.data.reward_by_source)
    is_trained = not config.debug.rollout_only and not is_sft(config) and algo.loss_type != LossType.custom_loss
    if not has_zero_reward(reward) or not scores_samples(config) or not is_trained:
        return []
    if uses_teacher(algo) or any(others):
        return []
    fix = "set algo.opd_kl_coef=1.0 and a teacher, or choose reward=exact_match or reward=math"
    return [Problem(path="reward.type", rule="not be zero without distillation", value="zero", fix=fix)]


@rule
def reward_has_labels(config: RunConfig) -> list[Problem]:
    """Most built-in rewards compare with a label."""
    labels = config.data.label_key
    if is_sft(config):
        labels = config.eval.label_key or labels  # only evaluations are scored
    comparing = {key: name for key, name in builtin_rewards(config).items() if name not in WITHOUT_LABELS}
    if not comparing or labels is not None or not uses_engines(config):
        return []
    key, name = next(iter(comparing.items()))
    rule, fix = f"be set with {key}={name}", "set it to the field with the answer"
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
    reward = show(config.eval.stop_reward)
    rule, fix = f"be set with eval.stop_reward={reward}", "set eval.interval=1, or eval.stop_reward=null"
    return [Problem(path="eval.interval", rule=rule, value="null", fix=fix)]


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
        names=("reward.batch_size",),
        when=lambda config: config.reward.custom_path is not None or config.reward.url is None,
        why="there is no reward server: reward.url is not set, or reward.custom_path is",
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
