"""Rules about the engines of a judge or reward model, and about the built-in judge."""

from __future__ import annotations

import re
import string

from rlscale.config.groups.judge import RewardEngineKind
from rlscale.config.groups.reward import RewardType
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    builtin_rewards,
    frozen_models,
    has_reward_engines,
    num_gpus_per_node,
    reward_engine_kind,
    uses_engines,
)
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

PLACEHOLDERS = ("prompt", "response", "label")


def judged_keys(config: RunConfig) -> list[str]:
    """The keys that name the built-in judge."""
    return [key for key, name in builtin_rewards(config).items() if name == RewardType.judge]


@rule
def judge_has_engines(config: RunConfig) -> list[Problem]:
    """The built-in judge asks a model."""
    named = judged_keys(config)
    if not named or config.reward.engine.num_gpus or not uses_engines(config):
        return []
    fix = "set it, e.g. reward.engine.num_gpus=1, and the judge's model as reward.engine.hf_checkpoint"
    rule = f"be at least 1 with {named[0]}=judge"
    return [Problem(path="reward.engine.num_gpus", rule=rule, value="0", fix=fix)]


@rule
def named_reward_engine_has_a_file(config: RunConfig) -> list[Problem]:
    """`reward.engine.name` names a model of `sglang.config`, whose file is checked when it is read."""
    name = config.reward.engine.name
    if name is None or config.sglang.config is not None or not uses_engines(config):
        return []
    rule, fix = "be null without sglang.config", "set sglang.config to the file that has this model"
    return [Problem(path="reward.engine.name", rule=rule, value=show(name), fix=fix)]


@rule
def frozen_models_are_in_a_file(config: RunConfig) -> list[Problem]:
    """`sglang.config` sets the key: a file that is checked."""
    given = config.sglang.frozen_models
    if not given or config.sglang.config is not None or not uses_engines(config):
        return []
    fix = "remove it, and add the models to the file of sglang.config"
    return [Problem(path="sglang.frozen_models", rule="be empty without sglang.config", value=show(given), fix=fix)]


@rule
def frozen_models_fit_nodes(config: RunConfig) -> list[Problem]:
    """As engines of a reward model."""
    node = num_gpus_per_node(config)
    wrong = [
        (name, each.num_gpus_per_engine)
        for name, each in frozen_models(config).items()
        if each.num_gpus_per_engine > node and each.num_gpus_per_engine % node
    ]
    rule, fix = f"have num_gpus_per_engine of at most cluster.num_gpus_per_node={node}, or a multiple of it", "lower it"
    return [Problem(path="sglang.config", rule=rule, value=f"{size} for {name}", fix=fix) for name, size in wrong]


@rule
def reward_engines_are_used(config: RunConfig) -> list[Problem]:
    """Functions of users are checked when they are imported, and rows of `reward.type` when they are read."""
    reward = config.reward
    builtin = builtin_rewards(config)
    if not has_reward_engines(config) or not reward.functions or len(builtin) < len(reward.functions):
        return []
    if judged_keys(config):
        return []
    rule, fix = "be 0 without a function that asks the engines", "set it to 0, or name judge in reward.functions"
    return [Problem(path="reward.engine.num_gpus", rule=rule, value=show(reward.engine.num_gpus), fix=fix)]


@rule
def reward_engines_have_whole_gpus(config: RunConfig) -> list[Problem]:
    engine = config.reward.engine
    if not has_reward_engines(config) or engine.num_gpus % engine.num_gpus_per_engine == 0:
        return []
    size = engine.num_gpus_per_engine
    rule, fix = (
        f"be a multiple of reward.engine.num_gpus_per_engine={size}",
        f"set it to {-(-engine.num_gpus // size) * size}",
    )
    return [Problem(path="reward.engine.num_gpus", rule=rule, value=show(engine.num_gpus), fix=fix)]


@rule
def reward_engines_fit_nodes(config: RunConfig) -> list[Problem]:
    """An engine uses a part of one node, or several whole nodes."""
    size, node = config.reward.engine.num_gpus_per_engine, num_gpus_per_node(config)
    if not has_reward_engines(config) or size <= node or size % node == 0:
        return []
    rule, fix = f"be at most cluster.num_gpus_per_node={node}, or a multiple of it", f"set it to {node}"
    return [Problem(path="reward.engine.num_gpus_per_engine", rule=rule, value=show(size), fix=fix)]


@rule
def reward_engine_kind_is_set(config: RunConfig) -> list[Problem]:
    """The run starts the engines of a judge, even if it uses external ones for rollouts."""
    is_external = config.rollout.external or config.rollout.engine == EngineKind.external
    if not has_reward_engines(config) or config.reward.engine.kind is not None or not is_external:
        return []
    fix = "set reward.engine.kind=sglang"
    rule = "be set with external rollout engines"
    return [Problem(path="reward.engine.kind", rule=rule, value="null", fix=fix)]


@rule
def embedded_reward_engines_are_small(config: RunConfig) -> list[Problem]:
    """The embedded engine has one GPU and only generates."""
    engine = config.reward.engine
    if not has_reward_engines(config) or reward_engine_kind(config) != RewardEngineKind.embedded:
        return []
    problems = []
    if engine.num_gpus_per_engine > 1:
        value, fix = show(engine.num_gpus_per_engine), "set it to 1, or reward.engine.kind=sglang"
        path = "reward.engine.num_gpus_per_engine"
        problems.append(Problem(path=path, rule="be 1 with the embedded engine", value=value, fix=fix))
    if engine.is_embedding:
        rule, fix = "be false with the embedded engine", "set it to false, or reward.engine.kind=sglang"
        problems.append(Problem(path="reward.engine.is_embedding", rule=rule, value="true", fix=fix))
    return problems


@rule
def reward_models_do_not_judge(config: RunConfig) -> list[Problem]:
    """A reward model generates no text."""
    named = judged_keys(config)
    if not has_reward_engines(config) or not config.reward.engine.is_embedding or not named:
        return []
    fix = f"set it to false, or replace {named[0]} by your own reward, which calls judge.score"
    return [Problem(path="reward.engine.is_embedding", rule=f"be false with {named[0]}=judge", value="true", fix=fix)]


@rule
def judge_prompt_has_the_response(config: RunConfig) -> list[Problem]:
    prompt, path = config.reward.judge.prompt, "reward.judge.prompt"
    if not judged_keys(config) or not uses_engines(config):
        return []
    try:
        parts = [part for part in string.Formatter().parse(prompt) if part[1] is not None]
    except ValueError as error:
        fix = f"write {{{{ and }}}} for braces ({error})"
        return [Problem(path=path, rule="be a template", value=show(prompt), fix=fix)]
    # Formats and conversions, such as {response:d}, would fail at the first answer.
    texts = {f"{name}{'!' if mark else ''}{mark or ''}{':' if form else ''}{form}" for _, name, form, mark in parts}
    unknown = sorted(texts - set(PLACEHOLDERS))
    if unknown:
        rule = "have only the placeholders {prompt}, {response} and {label}"
        fix = "write {{ and }} for braces"
        return [Problem(path=path, rule=rule, value=f"{{{unknown[0]}}}", fix=fix)]
    if "response" in texts:
        return []
    return [Problem(path=path, rule="have the placeholder {response}", value=show(prompt), fix="add it")]


@rule
def judge_pattern_has_a_group(config: RunConfig) -> list[Problem]:
    pattern, path = config.reward.judge.pattern, "reward.judge.pattern"
    if not judged_keys(config) or not uses_engines(config):
        return []
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        return [Problem(path=path, rule="be a regular expression", value=pattern, fix=f"correct it: {error}")]
    if compiled.groups:
        return []
    fix = r"put parentheses around the number, e.g. 'Score: (\d+)'"
    return [Problem(path=path, rule="have a group for the number", value=pattern, fix=fix)]


@rule
def judge_scores_have_a_range(config: RunConfig) -> list[Problem]:
    judge = config.reward.judge
    if not judged_keys(config) or judge.min_score < judge.max_score or not uses_engines(config):
        return []
    rule, fix = f"be above reward.judge.min_score={judge.min_score:g}", "raise it"
    return [Problem(path="reward.judge.max_score", rule=rule, value=show(judge.max_score), fix=fix)]


@rule
def rehearsals_have_no_judge(config: RunConfig) -> list[Problem]:
    """A model with random weights gives no scores."""
    if not config.run.rehearsal or not has_reward_engines(config):
        return []
    fix = "set it to 0 and reward.type=random for the rehearsal"
    value = show(config.reward.engine.num_gpus)
    return [Problem(path="reward.engine.num_gpus", rule="be 0 with run.rehearsal", value=value, fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("reward.engine",),
        when=lambda config: config.reward.engine.num_gpus == 0,
        why="reward.engine.num_gpus is 0",
    ),
    IgnoredKey(
        names=("reward.engine.server_args",),
        when=lambda config: reward_engine_kind(config) == RewardEngineKind.embedded,
        why="the embedded engine has no arguments of SGLang",
    ),
)
