"""Rules about runs of a part of the loop, their files, and assertions about a run."""

from __future__ import annotations

from rlscale.config.groups.algo import LossType
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("debug.rollout_only", "debug.train_only", "debug.load_rollout_data")
def only_one_part_runs_alone(config: RunConfig) -> list[Problem]:
    """Loading rollouts implies training alone."""
    debug = config.debug
    if not debug.rollout_only or not (debug.train_only or debug.load_rollout_data is not None):
        return []
    other = "debug.train_only" if debug.train_only else "debug.load_rollout_data"
    return [Problem(path="debug.rollout_only", rule=f"be false with {other}", value="true", fix="keep one of them")]


@rule("debug.train_only", "debug.load_rollout_data", "algo.loss_type")
def training_alone_has_samples(config: RunConfig) -> list[Problem]:
    debug, is_sft = config.debug, config.algo.loss_type == LossType.sft_loss
    if not debug.train_only or debug.load_rollout_data is not None or is_sft:
        return []
    fix = "set it to files that debug.save_rollout_data wrote, e.g. dumps/{rollout_id}.jsonl, or choose algo=sft"
    return [Problem(path="debug.load_rollout_data", rule="be set with debug.train_only", value="null", fix=fix)]


@rule("debug.rollout_only", "algo.loss_type")
def supervised_training_generates_nothing(config: RunConfig) -> list[Problem]:
    if not config.debug.rollout_only or config.algo.loss_type != LossType.sft_loss:
        return []
    rule = "be false with algo.loss_type=sft_loss"
    return [Problem(path="debug.rollout_only", rule=rule, value="true", fix="choose another algo")]


@rule("debug.save_train_data", "debug.save_rollout_data")
def dumps_differ(config: RunConfig) -> list[Problem]:
    train, rollout = config.debug.save_train_data, config.debug.save_rollout_data
    if train is None or train != rollout:
        return []
    rule, fix = "differ from debug.save_rollout_data", "each would overwrite the other; give it a name of its own"
    return [Problem(path="debug.save_train_data", rule=rule, value=train, fix=fix)]


@rule("debug.save_train_data", "debug.load_rollout_data")
def debug_files_are_templates(config: RunConfig) -> list[Problem]:
    names = ("save_train_data", "load_rollout_data")
    given = {f"debug.{name}": getattr(config.debug, name) for name in names}
    return [
        Problem(
            path=path, rule="contain {rollout_id}", value=value, fix="each rollout has its file: dumps/{rollout_id}"
        )
        for path, value in given.items()
        if value is not None and "{rollout_id}" not in value
    ]


@rule("ci.metric_checker_key", "ci.metric_checker_threshold")
def checked_metric_has_a_threshold(config: RunConfig) -> list[Problem]:
    key, threshold = config.ci.metric_checker_key, config.ci.metric_checker_threshold
    if (key is None) == (threshold is None):
        return []
    if key is None:
        rule, fix = f"be set with ci.metric_checker_threshold={threshold:g}", "name a metric, e.g. eval/reward"
        return [Problem(path="ci.metric_checker_key", rule=rule, value="null", fix=fix)]
    rule, fix = f"be set with ci.metric_checker_key={key}", "set the value that it must reach"
    return [Problem(path="ci.metric_checker_threshold", rule=rule, value="null", fix=fix)]


@rule("data.num_rollout", "eval.interval")
def something_is_done(config: RunConfig) -> list[Problem]:
    if config.data.num_rollout != 0 or config.eval.interval is not None:
        return []
    rule, fix = "be set with data.num_rollout=0", "without rollouts a run only evaluates; set eval.interval=1"
    return [Problem(path="eval.interval", rule=rule, value="null", fix=fix)]
