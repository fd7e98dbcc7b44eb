"""Rules about the entries of `rollout.sampling_params`, which requests pass on to the engine."""

from __future__ import annotations

from rlscale.config.groups.rollout import EngineKind
from rlscale.config.passthrough.field_types import fits, type_in_words
from rlscale.config.passthrough.sglang_sampling_params import (
    BOUNDS,
    CHANGES_DISTRIBUTION,
    DROPPED_BY_ROUTER,
    EMBEDDED,
    NEUTRAL,
    RESERVED,
    load_parameters,
)
from rlscale.config.problems import nearest, show
from rlscale.config.rules.conditions import server_groups, uses_engines, uses_external_engines, uses_sglang_router
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

KEY = "rollout.sampling_params"
_LISTING = "the documentation of SGLang's sampling parameters lists them"


@rule
def sampling_params_are_known(config: RunConfig) -> list[Problem]:
    """The entries are sampling parameters of SGLang with values of their type, and none that a key of rlscale sets."""
    given = config.rollout.sampling_params
    if not given:
        return []
    parameters = load_parameters(config.sglang.python)
    problems = []
    for name, value in given.items():
        if name in RESERVED:
            rule, fix = "not be set, because rlscale sets it", RESERVED[name]
        elif name not in parameters.types:
            found = nearest(name, [each for each in parameters.types if each not in RESERVED])
            rule = f"be a sampling parameter of SGLang {parameters.version}"
            fix = f"did you mean {KEY}.{found}?" if found else _LISTING
        elif value is not None and not fits(value, parameters.types[name]):
            rule, fix = f"be {type_in_words(parameters.types[name])}", "remove it to use SGLang's default"
        else:
            continue
        problems.append(Problem(path=f"{KEY}.{name}", rule=rule, value=show(value), fix=fix))
    return problems


@rule
def sampling_params_are_within_bounds(config: RunConfig) -> list[Problem]:
    """An engine refuses a request with a value outside of its bounds, which would end the run."""
    problems = []
    for name, (low, high) in BOUNDS.items():
        value = config.rollout.sampling_params.get(name)
        if isinstance(value, int | float) and not low <= value <= high:
            rule, fix = f"be at least {low:g} and at most {high:g}", f"set it to {NEUTRAL[name]:g} for no penalty"
            problems.append(Problem(path=f"{KEY}.{name}", rule=rule, value=show(value), fix=fix))
    return problems


@rule
def min_new_tokens_fits(config: RunConfig) -> list[Problem]:
    """The minimum length of a response is at most the maximum one."""
    least, longest = config.rollout.sampling_params.get("min_new_tokens"), config.rollout.max_response_len
    if not isinstance(least, int) or 0 <= least <= longest:
        return []
    rule = f"be at least 0 and at most rollout.max_response_len={longest}"
    fix = f"set it to {longest} or less, but not below 0"
    return [Problem(path=f"{KEY}.min_new_tokens", rule=rule, value=show(least), fix=fix)]


@rule
def embedded_engine_supports_the_sampling_params(config: RunConfig) -> list[Problem]:
    """The embedded engine has no grammars, no biases and no regular expressions that end a response."""
    given = {name: value for name, value in config.rollout.sampling_params.items() if value is not None}
    if (
        not given
        or config.rollout.engine != EngineKind.embedded
        or uses_external_engines(config)
        or not uses_engines(config)
    ):
        return []
    rule, fix = "not be set with rollout.engine=embedded", f"choose rollout=sglang; it supports {', '.join(EMBEDDED)}"
    # Another engine would not help a misspelled name, which another rule reports.
    known = load_parameters(config.sglang.python).types
    return [
        Problem(path=f"{KEY}.{name}", rule=rule, value=show(value), fix=fix)
        for name, value in given.items()
        if name in known and name not in EMBEDDED and name not in RESERVED
    ]


@rule
def router_passes_on_the_sampling_params(config: RunConfig) -> list[Problem]:
    """sglang-router silently drops some sampling parameters of a request."""
    given = config.rollout.sampling_params
    names = [name for name in DROPPED_BY_ROUTER if given.get(name) is not None]
    if not names or not uses_sglang_router(config):
        return []
    if server_groups(config):
        rule, fix = "not be set with prefill and decode groups in sglang.config", "remove it; sglang-router drops it"
        return [Problem(path=f"{KEY}.{names[0]}", rule=rule, value=show(given[names[0]]), fix=fix)]
    rule, fix = (
        f"be false with {KEY}.{names[0]}",
        "set router.enabled=false or router.use_middleware_router=true; sglang-router does not pass it on",
    )
    return [Problem(path="router.enabled", rule=rule, value="true", fix=fix)]


@rule
def true_on_policy_mode_excludes_penalties(config: RunConfig) -> list[Problem]:
    """Logprobs of a distribution with penalties are not those that the trainer computes."""
    if not config.train.true_on_policy_mode:
        return []
    rule, fix = "not be set with train.true_on_policy_mode", "remove it; the trainer computes logprobs without it"
    given = config.rollout.sampling_params
    return [
        Problem(path=f"{KEY}.{name}", rule=rule, value=show(given[name]), fix=fix) for name in changing_params(config)
    ]


def changing_params(config: RunConfig) -> list[str]:
    """Entries with which the engine samples from another distribution than the trainer computes."""
    given = config.rollout.sampling_params
    return [
        name
        for name in CHANGES_DISTRIBUTION
        if given.get(name) is not None and given[name] != NEUTRAL.get(name, {}) and given[name] != ""
    ]


def warn_sampling_params(config: RunConfig) -> list[str]:
    """A warning about parameters that change the distribution that the engine samples from."""
    names = changing_params(config)
    if not names or not uses_engines(config):
        return []
    listed = ", ".join(f"{KEY}.{name}={show(config.rollout.sampling_params[name])}" for name in names)
    advice = "" if config.algo.use_tis else "; set algo.use_tis=true to weight tokens by the difference"
    return [
        f"{listed}: the engine samples from another distribution than the trainer computes and reports its logprobs, "
        f"so logprob_diff/* contains this difference and does not show errors of the engine{advice}"
    ]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=(KEY,),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so there are no engines",
    ),
)
