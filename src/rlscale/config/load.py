"""From the words of a command line to a config that is right, complete and read-only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from rlscale.config.check_fields import CheckedFields, check_fields
from rlscale.config.errors import DEFAULT, DERIVED, EVERYTHING, show
from rlscale.config.groups.custom import merge_custom_file
from rlscale.config.hydra.compose import Composed, compose
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import CommandLine, parse_command_line
from rlscale.config.keys import keys
from rlscale.config.notes import warnings_of
from rlscale.config.passthrough import is_passed
from rlscale.config.resolve.draft import Derived, resolve
from rlscale.config.rules import check_rules, rope_type_is_meant
from rlscale.config.run_config import RunConfig
from rlscale.config.unsupported import check_built
from rlscale.errors import ConfigError, Problem

_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A config and how it came about."""

    config: RunConfig
    derived: tuple[Derived, ...]
    warnings: tuple[str, ...]
    overrides: tuple[str, ...]
    composed: Composed = field(repr=False)  # knows where each value was set


def load_config(overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> RunConfig:
    """The config that `rlscale-train <overrides>` runs.

    Args:
        overrides: words of a command line, e.g. `["experiment=quickstart", "algo.eps_clip=0.1"]`. Without an experiment
            it is `quickstart`.
        config_dir: folder with further options, laid out like `conf/`. None: only those that come with rlscale.

    Raises: ConfigError with every mistake that was found.
    """
    return load_config_with_notes(overrides, config_dir=config_dir).config


def load_config_with_notes(
    overrides: Sequence[str] = (), *, config_dir: Path | None = None, to_run: bool = True
) -> Loaded:
    """Like `load_config`, with what was derived and what deserves a warning.

    Args:
        to_run: false: only to look at; values of parts that are not built yet are then no mistake.
    """
    folders = ConfigFolders.find(config_dir)
    line = parse_command_line(overrides, folders.groups())
    return load_parsed(line, overrides, folders, to_run=to_run)


def load_parsed(line: CommandLine, overrides: Sequence[str], folders: ConfigFolders, *, to_run: bool = True) -> Loaded:
    """The rest of the way, once the words are read."""
    composed = compose(line.words, command_line_keys=line.keys, folders=folders)
    problems = line.problems + composed.problems
    problems += [with_origin(problem, composed) for problem in merge_custom_file(composed.values, line.words)]
    checked = check_fields(composed.values, composed.origin)
    told = line.broken | composed.broken
    broken = told | checked.broken
    found = [problem for problem in checked.problems if not _is_consequence(problem, told)]
    if to_run:
        found += [problem for problem in check_built(checked.config) if not _is_consequence(problem, broken)]
    found += check_rules(checked.config, broken=broken)
    found += rope_type_is_meant(checked.config, checked.keys - broken)
    problems += [with_origin(problem, composed) for problem in found]
    if problems:
        raise ConfigError(problems)
    given = checked.config
    given.run.experiment = line.experiment
    given.run.overrides = list(overrides)
    given.run.config_dir = None if folders.extra is None else str(folders.extra)
    config, derived = resolve(given)
    config.freeze()
    return Loaded(
        config=config,
        derived=tuple(derived),
        warnings=tuple(warnings_of(given, _changed(checked) | checked.passed)),
        overrides=tuple(overrides),
        composed=composed,
    )


def _is_consequence(problem: Problem, broken: set[str]) -> bool:
    """Whether a key is unset or unbuilt only because the word that should have set it was wrong."""
    if problem.origin:
        return False
    return EVERYTHING in broken or any(problem.path == name or problem.path.startswith(f"{name}.") for name in broken)


def with_origin(problem: Problem, composed: Composed) -> Problem:
    """Says where the value came from, and where those of other keys did that the rule names."""
    path, key = problem.path, keys().get(problem.path)
    if key is None and not is_passed(path):
        return problem
    is_default = key is None or key.required or problem.value == show(key.default)
    own = problem.origin or composed.origin(path) or (DEFAULT if is_default else DERIVED)
    others = (name for name in _KEY.findall(problem.rule) if name in keys() and name != path)
    beside = [
        f"{name}: {origin}" for name in dict.fromkeys(others) if (origin := composed.origin(name)) not in ("", own)
    ]
    return replace(problem, origin="; ".join([own, *beside]))


def _changed(checked: CheckedFields) -> set[str]:
    """Keys that were set to something else than their default."""
    changed = set()
    for path in checked.keys:
        value = attrgetter(path)(checked.config)
        if value != keys()[path].default:
            changed.add(path)
    return changed
