"""Loads a config: parses a command line, composes YAML files, checks everything, derives unset keys, freezes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from rlscale.config.advice import Advisor
from rlscale.config.check_fields import CheckedFields, check_fields
from rlscale.config.custom_file import merge_custom_file
from rlscale.config.engine_models import merge_engine_file
from rlscale.config.hydra.compose import Composed, compose
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import CommandLine, parse_command_line
from rlscale.config.keys import keys
from rlscale.config.library_limits import check_limits
from rlscale.config.passthrough import is_passthrough
from rlscale.config.problems import ALL_KEYS, DEFAULT, DERIVED, show
from rlscale.config.resolve.defaults import resolve
from rlscale.config.resolve.draft import Derived
from rlscale.config.rules import check_given_rope_type, check_rules, find_warnings
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem
from rlscale.secrets import REDACTED, is_secret, redact, redact_override

CheckConfig = Callable[[RunConfig, Collection[str]], Sequence[Problem]]
"""Problems of a resolved config and the machine; the second argument are keys that are wrong and have a default."""

_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A resolved config and the record of how it was made."""

    config: RunConfig
    derived: tuple[Derived, ...]
    warnings: tuple[str, ...]
    overrides: tuple[str, ...]  # as the user typed them
    composed: Composed = field(repr=False)  # knows the origin of each value


def check_nothing(config: RunConfig, broken: Collection[str]) -> Sequence[Problem]:
    """Reports no problem."""
    return ()


def load_config(overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> RunConfig:
    """Loads the config that `rlscale-train <overrides>` runs.

    Args:
        overrides: arguments of a command line, e.g. `["experiment=quickstart", "algo.eps_clip=0.1"]`. The default
            experiment is `quickstart`.
        config_dir: folder with further options, with the layout of `conf/`. None: only those of rlscale.

    Raises: ConfigError with every problem that was found.
    """
    return load_config_with_notes(overrides, config_dir=config_dir).config


def load_config_with_notes(
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    to_run: bool = True,
    check: CheckConfig = check_nothing,
) -> LoadedConfig:
    """Like `load_config`, with the derived values and the warnings.

    Args:
        to_run: False to inspect the config only: values that a library cannot carry out are then allowed.
        check: finds further problems of the resolved config, which are raised together with the others.
    """
    folders = ConfigFolders.find(config_dir)
    line = parse_command_line(overrides, folders.groups())
    return load_parsed(line, overrides, folders, to_run=to_run, check=check)


def load_parsed(
    line: CommandLine,
    overrides: Sequence[str],
    folders: ConfigFolders,
    *,
    to_run: bool = True,
    check: CheckConfig = check_nothing,
) -> LoadedConfig:
    """Composes, checks and resolves a parsed command line. The arguments are those of `load_config_with_notes`."""
    composed = compose(line.overrides, command_line_keys=line.keys, folders=folders)
    return load_composed(composed, line, overrides, to_run=to_run, check=check)


def load_composed(
    composed: Composed,
    line: CommandLine,
    overrides: Sequence[str],
    *,
    to_run: bool = True,
    check: CheckConfig = check_nothing,
) -> LoadedConfig:
    """Checks and resolves composed values. The arguments are those of `load_config_with_notes`."""
    folders = composed.folders
    problems = line.problems + composed.problems
    problems += [with_origin(problem, composed) for problem in merge_custom_file(composed.values, line.overrides)]
    problems += [with_origin(problem, composed) for problem in merge_engine_file(composed.values, composed.is_given)]
    checked = check_fields(composed.values, composed.origin)
    # A key that is unset because its override was wrong must not be reported a second time.
    reported = line.broken | composed.broken
    broken = reported | checked.broken
    found = [problem for problem in checked.problems if not _is_consequence(problem, reported)]
    if to_run:
        found += [problem for problem in check_limits(checked.config) if not _is_consequence(problem, broken)]
    found += check_rules(checked.config, broken=broken)
    found += check_given_rope_type(checked.config, checked.keys - broken)
    problems += [with_origin(problem, composed) for problem in found]
    if problems and (check is check_nothing or ALL_KEYS in broken):
        raise ConfigError(_advised(problems, composed, given=None if ALL_KEYS in broken else checked.config))
    # The record of the command line is part of the config, so that it is saved with the run.
    given = checked.config
    given.run.experiment = line.experiment
    given.run.overrides = list(overrides)
    given.run.config_dir = None if folders.extra is None else str(folders.extra)
    # Resolved in spite of problems, because what it names can be checked all the same.
    config, derived = resolve(given)
    config.freeze()
    # A second problem of a path that breaks a rule could only be a consequence.
    known = {problem.path for problem in problems}
    problems += [with_origin(problem, composed) for problem in check(config, broken) if problem.path not in known]
    if problems:
        raise ConfigError(_advised(problems, composed, given=given))
    return LoadedConfig(
        config=config,
        derived=tuple(derived),
        warnings=(*line.warnings, *find_warnings(given, _changed_keys(checked, composed, line) | checked.passthrough)),
        overrides=tuple(overrides),
        composed=composed,
    )


def _advised(problems: Sequence[Problem], composed: Composed, *, given: RunConfig | None) -> list[Problem]:
    """Problems with complete advice.

    Args:
        given: the config with the default of every wrong key. None: too little of it is known to derive anything.
    """
    advisor = Advisor(composed=composed, derived=[] if given is None else resolve(given)[1])
    return [_without_secret(advisor.complete(problem)) for problem in problems]


def _without_secret(problem: Problem) -> Problem:
    """The problem without the value of a secret: the output of a job is often read by others."""
    path, value = problem.path, problem.value
    if value in ("", show(""), show(None)):
        return problem
    parts = path.split(".")
    if any(is_secret(".".join(parts[: end + 1])) for end in range(len(parts))):
        shown = REDACTED
    else:
        try:
            tree = json.loads(value)
            shown = value if redact(tree, path) == tree else show(redact(tree, path))
        except ValueError:  # it is no JSON, but a text, perhaps with the grammar of Hydra
            shown = redact_override(f"{path}={value}").removeprefix(f"{path}=")
    return problem if shown == value else replace(problem, value=shown, fix=problem.fix.replace(value, shown))


def _is_consequence(problem: Problem, broken: set[str]) -> bool:
    """Whether a key is unset or refused only because the override that should set it was wrong."""
    if problem.origin:
        return False
    return ALL_KEYS in broken or any(problem.path == name or problem.path.startswith(f"{name}.") for name in broken)


def with_origin(problem: Problem, composed: Composed) -> Problem:
    """Adds the origin of the value, and the origins of the other keys that the rule names."""
    path = problem.path
    if (of_list := path.rpartition("."))[2].isdigit() and of_list[0] in keys():
        path = of_list[0]  # an entry of a list has the origin of the list
    key = keys().get(path)
    if key is None and not is_passthrough(path):
        return problem
    # A value without an origin is the default, or derived from other keys.
    is_default = key is None or key.required or problem.value == show(key.default)
    own = problem.origin or composed.origin(path) or (DEFAULT if is_default else DERIVED)
    others = (name for name in _KEY.findall(problem.rule) if name in keys() and name != path)
    # Name an origin once: keys that come from the same place as `path` need no entry.
    further = [
        f"{name}: {origin}" for name in dict.fromkeys(others) if (origin := composed.origin(name)) not in ("", own)
    ]
    return replace(problem, origin="; ".join([own, *further]))


def _changed_keys(checked: CheckedFields, composed: Composed, line: CommandLine) -> set[str]:
    """Keys that were set to another value than their default, and switches that the command line turned on."""
    changed = set()
    # A reward of the user replaces that of the experiment, which is the purpose and no news.
    replaced = set() if composed.is_given("reward.type") else {"reward.type"}
    for path in checked.keys:
        value = attrgetter(path)(checked.config)
        # Who types a switch that is on by default relies on it: report that it has no effect.
        if value != keys()[path].default or (value is True and path in line.keys):
            changed.add(path)
    return changed - replaced
