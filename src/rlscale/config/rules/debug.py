"""Rules about partial runs, dump files, CI checks and logging."""

from __future__ import annotations

import os
from operator import attrgetter

from rlscale.config.addresses import advise_url, public_url
from rlscale.config.groups.logging import WandbMode
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.rules.conditions import is_sft, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def one_partial_run(config: RunConfig) -> list[Problem]:
    """`debug.load_rollout_data` implies `debug.train_only`."""
    debug = config.debug
    if not debug.rollout_only or not (debug.train_only or debug.load_rollout_data is not None):
        return []
    other = "debug.train_only" if debug.train_only else "debug.load_rollout_data"
    return [Problem(path="debug.rollout_only", rule=f"be false with {other}", value="true", fix="keep one of them")]


@rule
def train_only_has_samples(config: RunConfig) -> list[Problem]:
    debug = config.debug
    if not debug.train_only or debug.load_rollout_data is not None or is_sft(config):
        return []
    fix = "set it to files written by debug.save_rollout_data, e.g. dumps/{rollout_id}.jsonl, or choose algo=sft"
    return [Problem(path="debug.load_rollout_data", rule="be set with debug.train_only", value="null", fix=fix)]


@rule
def rollout_only_excludes_sft(config: RunConfig) -> list[Problem]:
    if not config.debug.rollout_only or not is_sft(config):
        return []
    rule, fix = "be false with algo.loss_type=sft_loss", "choose another algo; supervised training does not generate"
    return [Problem(path="debug.rollout_only", rule=rule, value="true", fix=fix)]


@rule
def profiled_rollouts_are_in_the_run(config: RunConfig) -> list[Problem]:
    path, given, number = "debug.profile_rollouts", config.debug.profile_rollouts, config.data.num_rollout
    if given and min(given) < 0:
        fix = "write numbers of rollouts, which count from 0"
        return [Problem(path=path, rule="contain numbers from 0", value=show(given), fix=fix)]
    # Nothing is profiled in a run that only evaluates or generates; a warning says so.
    if not given or not number or config.debug.rollout_only or max(given) < number:
        return []
    rule, fix = f"be below data.num_rollout={number}", f"the last rollout is {number - 1}; write numbers up to it"
    return [Problem(path=path, rule=rule, value=show(given), fix=fix)]


@rule
def dump_files_differ(config: RunConfig) -> list[Problem]:
    train, rollout = config.debug.save_train_data, config.debug.save_rollout_data
    if train is None or train != rollout:
        return []
    rule, fix = "differ from debug.save_rollout_data", "choose another name; one file would overwrite the other"
    return [Problem(path="debug.save_train_data", rule=rule, value=train, fix=fix)]


@rule
def dump_files_are_templates(config: RunConfig) -> list[Problem]:
    names = ("save_rollout_data", "save_train_data", "load_rollout_data")
    given = {f"debug.{name}": getattr(config.debug, name) for name in names}
    fix = "write e.g. dumps/{rollout_id}.jsonl; each rollout has its own file"
    return [
        Problem(path=path, rule="contain {rollout_id}", value=value, fix=fix)
        for path, value in given.items()
        if value is not None and "{rollout_id}" not in value
    ]


OUTPUTS = (
    "run.dir",
    "checkpoint.save",
    "checkpoint.save_hf",
    "critic.save",
    "debug.dump_details",
    "debug.load_rollout_data",
    "debug.memory_snapshot_dir",
    "debug.profile_dir",
    "debug.save_rollout_data",
    "debug.save_train_data",
    "logging.tensorboard.dir",
    "logging.wandb.dir",
    "model.cache_dir",
    "train.weight_folder",
)
"""Keys of the files and folders that a run writes, and of dumps that it reads."""

PATHS = (
    *OUTPUTS,
    "checkpoint.load",
    "critic.load",
    "data.prompt_data",
    "data.prompt_files",
    "eval.config",
    "eval.prompt_data",
    "model.hf_checkpoint",
    "model.ref_load",
    "model.teacher_load",
    "reward.engine.hf_checkpoint",
    "rollout.script_path",
    "sglang.config",
    "train.lora.load",
)
"""Keys of files and folders; `~` in them is the home folder."""


@rule
def home_folders_exist(config: RunConfig) -> list[Problem]:
    """`~name` is the home folder of that user. Files that a run reads are searched for anyway."""
    given = {path: str(attrgetter(path)(config)) for path in OUTPUTS}
    rule, fix = "begin with the home folder of a user of this machine", "write the full path, or ~/ for your own"
    return [
        Problem(path=path, rule=rule, value=value, fix=fix)
        for path, value in given.items()
        if value.startswith("~") and os.path.expanduser(value) == value
    ]


@rule
def checked_metric_has_a_threshold(config: RunConfig) -> list[Problem]:
    key, threshold = config.ci.metric_checker_key, config.ci.metric_checker_threshold
    if (key is None) == (threshold is None):
        return []
    if key is None:
        rule, fix = f"be set with ci.metric_checker_threshold={threshold:g}", "name a metric, e.g. eval/reward_mean"
        return [Problem(path="ci.metric_checker_key", rule=rule, value="null", fix=fix)]
    rule, fix = f"be set with ci.metric_checker_key={key}", "set the value that the metric must reach"
    return [Problem(path="ci.metric_checker_threshold", rule=rule, value="null", fix=fix)]


@rule
def empty_run_evaluates(config: RunConfig) -> list[Problem]:
    if config.data.num_rollout != 0 or config.eval.interval is not None:
        return []
    rule, fix = "be set with data.num_rollout=0", "set eval.interval=1; a run without rollouts only evaluates"
    return [Problem(path="eval.interval", rule=rule, value="null", fix=fix)]


ENGINE_KEYS = ("train.backend", "train.dtype", "batch.rollout_batch_size", "batch.n_samples_per_prompt")
"""Keys of the trainer groups that engines use as well."""

MODEL_KEYS = (
    "algo.advantage_estimator",
    "algo.compute_advantages_and_returns",
    "algo.custom_advantage_function_path",
    "algo.kl_coef",
    "algo.loss_type",
    "algo.opd_kl_coef",
    "algo.use_kl_loss",
)
"""Keys of the group `algo` that decide which models are loaded."""

PARTIAL_RUN: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=(
            "algo",
            "checkpoint.save_final",
            "checkpoint.save_hf",
            "checkpoint.save_interval",
            "critic",
            "debug.profile_dir",
            "debug.profile_rollouts",
            "debug.save_train_data",
            "fault_tolerance",
            "fsdp",
            "megatron",
            "optim",
            "rollout.max_staleness",
            *(path for path in keys() if path.startswith("train.") and path not in ENGINE_KEYS),
            *(path for path in keys() if path.startswith("batch.") and path not in ENGINE_KEYS),
        ),
        when=lambda config: config.debug.rollout_only,
        why="debug.rollout_only does not train",
    ),
    IgnoredKey(
        names=("optim", *(path for path in keys() if path.startswith("algo.") and path not in MODEL_KEYS)),
        when=lambda config: config.data.num_rollout == 0,
        why="data.num_rollout=0 only evaluates",
    ),
)
"""Keys of several groups without effect if a part of the loop does not run."""


@rule
def wandb_host_is_a_url(config: RunConfig) -> list[Problem]:
    """The form counts also in offline mode, where wandb checks it and uses no server."""
    wandb = config.logging.wandb
    fix = None if wandb.host is None else advise_url(wandb.host, example="https://wandb.example.com")
    if not wandb.enabled or wandb.host is None or fix is None:
        return []
    rule = "be the URL of a server, http://<host>:<port> or https://..."
    return [Problem(path="logging.wandb.host", rule=rule, value=public_url(wandb.host), fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("run.config_dir", "run.experiment", "run.overrides"),
        when=lambda config: True,
        why="the command sets it",
    ),
    IgnoredKey(
        names=("debug.logprob_diff_warn",),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so there are no engines",
    ),
    IgnoredKey(
        names=("debug.profile_dir",),
        when=lambda config: config.debug.profile_rollouts is None,
        why="debug.profile_rollouts is not set",
    ),
    IgnoredKey(
        names=("ci.disable_kl_checker", "ci.metric_checker_key", "ci.metric_checker_threshold"),
        when=lambda config: not config.ci.enabled,
        why="ci.enabled is false",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("logging.wandb.") and path != "logging.wandb.enabled"),
        when=lambda config: not config.logging.wandb.enabled,
        why="logging.wandb.enabled is false",
    ),
    IgnoredKey(
        names=("logging.wandb.key", "logging.wandb.host"),
        when=lambda config: config.logging.wandb.mode == WandbMode.offline,
        why="logging.wandb.mode is offline",
    ),
    IgnoredKey(
        names=("logging.tensorboard.dir", "logging.tensorboard.project_name", "logging.tensorboard.experiment_name"),
        when=lambda config: not config.logging.tensorboard.enabled,
        why="logging.tensorboard.enabled is false",
    ),
    IgnoredKey(
        names=("logging.log_multi_turn", "logging.log_passrate", "logging.log_reward_category"),
        when=is_sft,
        why="algo.loss_type is sft_loss",
    ),
)
