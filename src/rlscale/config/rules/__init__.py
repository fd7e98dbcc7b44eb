"""Rules between keys (errors) and warnings about settings, one module per topic.

A rule is a small function from a RunConfig to its problems. If a key that a rule reads is itself wrong, the result of
the rule is ignored: it could only be a consequence. Bounds of a single key are in its `Field`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import accumulate

from rlscale.config.rules import (
    agent,
    algo,
    batch,
    buffer,
    critic,
    data,
    debug,
    disaggregation,
    engine_adapters,
    engine_parallel,
    engines,
    gateway,
    judge,
    library_args,
    linear_attention,
    low_precision,
    megatron,
    megatron_sinks,
    megatron_vision,
    model,
    network,
    optim,
    parallel,
    placement,
    reward_functions,
    rewards,
    sampling,
    sampling_params,
    sandbox,
    teacher,
    training,
    weights,
)
from rlscale.config.rules.agent import has_agent, has_environment, has_tools, runs_agents
from rlscale.config.rules.algo import warn_algo
from rlscale.config.rules.conditions import (
    asks_teachers,
    attaches,
    attention_groups,
    builtin_rewards,
    engine_views,
    frozen_models,
    has_critic_ranks,
    has_reward_engines,
    keeps_old_policies,
    learns_conversations,
    num_critic_ranks,
    num_engines,
    num_gpus_per_node,
    only_evaluates,
    opens_gpu_memory,
    overlaps,
    pipeline_stages,
    ranks_per_model,
    reads_buffer,
    resolve_decoupled_loss,
    reward_engine_kind,
    scores_samples,
    sends_adapters,
    server_groups,
    shares_base,
    uses_engines,
    uses_router,
    uses_sglang_router,
)
from rlscale.config.rules.debug import PATHS
from rlscale.config.rules.disaggregation import warn_server_groups
from rlscale.config.rules.gateway import needs_gateway
from rlscale.config.rules.low_precision import warn_low_precision
from rlscale.config.rules.model import check_given_rope_type
from rlscale.config.rules.optim import default_lr
from rlscale.config.rules.rule import IgnoredKey, Rule, Trace
from rlscale.config.rules.sampling_params import warn_sampling_params
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

__all__ = [
    "IGNORED",
    "MODULES",
    "PATHS",
    "RULES",
    "IgnoredKey",
    "Rule",
    "asks_teachers",
    "attaches",
    "attention_groups",
    "builtin_rewards",
    "check_given_rope_type",
    "check_rules",
    "default_lr",
    "engine_views",
    "find_unaffected",
    "find_warnings",
    "frozen_models",
    "has_agent",
    "has_critic_ranks",
    "has_environment",
    "has_reward_engines",
    "has_tools",
    "keeps_old_policies",
    "learns_conversations",
    "needs_gateway",
    "num_critic_ranks",
    "num_engines",
    "num_gpus_per_node",
    "only_evaluates",
    "opens_gpu_memory",
    "overlaps",
    "pipeline_stages",
    "ranks_per_model",
    "reads_buffer",
    "resolve_decoupled_loss",
    "reward_engine_kind",
    "runs_agents",
    "scores_samples",
    "sends_adapters",
    "server_groups",
    "shares_base",
    "uses_engines",
    "uses_router",
    "uses_sglang_router",
    "warn_algo",
    "warn_ignored",
]

MODULES = (
    model,
    data,
    sampling,
    agent,
    sampling_params,
    batch,
    parallel,
    engine_parallel,
    megatron,
    megatron_sinks,
    megatron_vision,
    linear_attention,
    algo,
    critic,
    training,
    engine_adapters,
    teacher,
    optim,
    weights,
    low_precision,
    placement,
    engines,
    disaggregation,
    gateway,
    library_args,
    rewards,
    reward_functions,
    judge,
    buffer,
    network,
    sandbox,
    debug,
)
"""Modules with rules, in the order in which their problems are reported."""

RULES: tuple[Rule, ...] = tuple(
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, Rule) and each.check.__module__ == module.__name__
)
"""All rules, in the order of the modules and of the lines in each."""

IGNORED: tuple[IgnoredKey, ...] = (
    *batch.IGNORED,
    *sampling.IGNORED,
    *agent.IGNORED,
    *sampling_params.IGNORED,
    *engines.IGNORED,
    *disaggregation.IGNORED,
    *gateway.IGNORED,
    *weights.IGNORED,
    *low_precision.IGNORED,
    *training.IGNORED,
    *megatron.IGNORED,
    *model.IGNORED,
    *data.IGNORED,
    *algo.IGNORED,
    *critic.IGNORED,
    *placement.IGNORED,
    # Entries about partial runs come after those of a single group, except for the optimiser.
    *rewards.IGNORED,
    *judge.IGNORED,
    *buffer.IGNORED,
    *network.IGNORED,
    *sandbox.IGNORED,
    *debug.IGNORED,
    *debug.PARTIAL_RUN,
    *optim.IGNORED,
)
"""All entries. The first one that applies to a key gives the reason."""

_IGNORED_BY_NAME = {
    name: [number for number, entry in enumerate(IGNORED) if name in entry.names]
    for each in IGNORED
    for name in each.names
}
"""Indices of the entries that name a key or a group."""

MAX_LINES = 3
"""Limit of warning lines per group and reason; an overlay can leave dozens of keys of an experiment without effect."""


def check_rules(config: RunConfig, *, broken: Iterable[str] = ()) -> list[Problem]:
    """Problems of all rules except those that read a broken key.

    Args:
        broken: keys and groups that are wrong by themselves and have a default in `config` instead. An empty string
            stands for all of them.
    """
    names = frozenset(broken)
    if not names:
        # The usual case: without broken keys no trace is needed.
        return [problem for each in RULES for problem in each(config)]
    return [] if "" in names else find_unaffected([each.trace(config) for each in RULES], names)


def find_unaffected(traces: Iterable[Trace], broken: Iterable[str]) -> list[Problem]:
    """Problems of those traces that read no broken key.

    Args:
        traces: of rules, all on one config.
        broken: keys and groups as of `check_rules`.
    """
    names = frozenset(broken)
    # A key is broken with its group, and with an entry of its mapping.
    outer = names.union(*map(_outer_names, names))
    return [
        problem
        for problems, read in traces
        if problems and outer.isdisjoint(read) and all(names.isdisjoint(_outer_names(key)) for key in read)
        for problem in problems
    ]


@cache
def _outer_names(key: str) -> tuple[str, ...]:
    """The groups that contain a key: `algo` and `algo.mis` of `algo.mis.low`."""
    return tuple(accumulate(key.split("."), "{}.{}".format))[:-1]


def find_warnings(config: RunConfig, set_keys: Iterable[str] = ()) -> list[str]:
    """Lists one line for each doubtful setting, and for each key of `set_keys` that has no effect.

    Args:
        config: as given, before it is resolved.
        set_keys: keys that the command line or a YAML file sets to a value other than the default.
    """
    doubtful = warn_algo(config) + warn_sampling_params(config) + warn_low_precision(config)
    doubtful += warn_server_groups(config)
    return doubtful + warn_ignored(config, set_keys)


def warn_ignored(config: RunConfig, set_keys: Iterable[str]) -> list[str]:
    """Warnings about keys that are set and have no effect; many keys of a group with one reason share a line."""
    reasons: dict[str, str] = {}
    for path in sorted(set_keys):
        # An entry names the key or a group that contains it: for `algo.mis.low` also `algo` and `algo.mis`.
        names = accumulate(path.split("."), "{}.{}".format)
        numbers = sorted({number for name in names for number in _IGNORED_BY_NAME.get(name, ())})
        applying = (IGNORED[number].why for number in numbers if IGNORED[number].when(config))
        if (why := next(applying, None)) is not None:
            reasons[path] = why
    # Keys of one group with one reason share a line.
    alike: dict[tuple[str, str], list[str]] = {}
    for path, why in reasons.items():
        alike.setdefault((path.rpartition(".")[0], why), []).append(path)
    return [line for (group, why), paths in alike.items() for line in _warning_lines(group, why, paths)]


def _warning_lines(group: str, why: str, paths: list[str]) -> list[str]:
    if len(paths) <= MAX_LINES:
        return [f"{path} is ignored: {why}" for path in paths]
    names = ", ".join(path.removeprefix(f"{group}.") for path in paths)
    return [f"{len(paths)} keys of {group} are ignored: {why} ({names})"]
