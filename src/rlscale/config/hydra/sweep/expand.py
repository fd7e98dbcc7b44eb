"""Expands the overrides of a sweep into jobs, and checks them before the first job starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlscale.config.check_fields import check_fields
from rlscale.config.hydra.compose import FAILURES
from rlscale.config.hydra.config_folders import PRIMARY
from rlscale.config.hydra.internals import override_parser
from rlscale.config.hydra.overrides import MAX_JOBS, CommandLine, count_values
from rlscale.config.keys import keys
from rlscale.config.problems import COMMAND_LINE, nearest
from rlscale.errors import Problem


def all_jobs(line: CommandLine) -> list[list[str]]:
    """The overrides of every combination of values; an interval has its ends."""
    return [list(overrides) for overrides in product(*_choices(line))]


def job_problems(line: CommandLine) -> list[Problem]:
    """The problem of a sweep with more jobs than anyone waits for."""
    sweeps = {each.key_or_group: each for each in _sweeps(line)}
    number = math.prod(map(count_values, sweeps.values()))
    if number <= MAX_JOBS:
        return []
    rule = f"have at most {MAX_JOBS} jobs, one for each combination of values"
    fix = "list fewer values, or let optuna choose: add hydra/sweeper=optuna"
    return [Problem(path="a sweep", rule=rule, value=f"{number:.0f} for {', '.join(sweeps)}", fix=fix)]


def some_jobs(line: CommandLine) -> list[list[str]]:
    """The smallest number of jobs that contain every value, and both ends of every interval, at least once."""
    choices = _choices(line)
    num_jobs = max((len(values) for values in choices), default=1)
    # A shorter list repeats its last value.
    return [[values[min(i, len(values) - 1)] for values in choices] for i in range(num_jobs)]


def value_problems(line: CommandLine) -> list[Problem]:
    """Problems of values that break the constraint of their key, and of invalid intervals."""
    problems: list[Problem] = []
    for override in _sweeps(line):
        problems += _interval_problems(override)
        path = override.key_or_group
        for value in _values(override) if path in keys() else []:
            nested: Any = value
            for name in reversed(path.split(".")):
                nested = {name: nested}
            # Other keys are unset here; keep the problems of this key only.
            found = check_fields(nested, lambda _: COMMAND_LINE).problems
            problems += [problem for problem in found if problem.path == path]
    return problems


def _interval_problems(override: Override) -> list[Problem]:
    value, path, text = override.value(), override.key_or_group, _typed_value(override)
    if not isinstance(value, IntervalSweep):
        return []
    low, high = interval_ends(override)
    if low > high:
        rule, fix = "have an interval with the lower end first", f"write {path}=interval({high:g},{low:g})"
        return [Problem(path=path, rule=rule, value=text, fix=fix, origin=COMMAND_LINE)]
    if "log" in value.tags and low <= 0:
        rule, fix = "have an interval above 0 with the tag log", f"remove the tag: {path}=interval({low:g},{high:g})"
        return [Problem(path=path, rule=rule, value=text, fix=fix, origin=COMMAND_LINE)]
    return []


def interval_problems(line: CommandLine) -> list[Problem]:
    """Problems of intervals, which a sweep over all combinations cannot use."""
    fix = "list them, a,b,c, or let optuna choose: add hydra/sweeper=optuna"
    rule = "have a list of values in a sweep of all combinations"
    return [
        Problem(path=each.key_or_group, rule=rule, value=_typed_value(each), fix=fix, origin=COMMAND_LINE)
        for each in _sweeps(line)
        if not each.is_discrete_sweep()
    ]


def hydra_problems(line: CommandLine, loader: ConfigLoader) -> list[Problem]:
    """Problems of the overrides of Hydra's own settings."""
    parsed = (override_parser().parse_override(text) for text in line.overrides)
    own = [override for override in parsed if override.is_hydra_override()]
    groups = [(each, _option_problem(each, loader)) for each in own if "/" in each.key_or_group]
    problems = [problem for _, problem in groups if problem]
    # Compose with the valid options: the selected launcher and sweeper define further keys.
    right = [str(override.input_line) for override, problem in groups if problem is None]
    try:
        known = loader.load_configuration(PRIMARY, right, RunMode.MULTIRUN)
    except FAILURES:
        return problems  # the problem is in a file; compose reports it
    keys = (override for override in own if "/" not in override.key_or_group)
    return problems + [problem for override in keys if (problem := _key_problem(override, known))]


def _option_problem(override: Override, loader: ConfigLoader) -> Problem | None:
    group, option = override.key_or_group, override.value()
    options = loader.get_group_options(group, ObjectType.CONFIG, PRIMARY, [])
    if option in options:
        return None
    found = nearest(str(option), options)
    fix = (f"did you mean {found}? " if found else "") + f"options: {', '.join(options)}"
    return Problem(path=group, rule="be one of its options", value=str(option), fix=fix, origin=COMMAND_LINE)


def _key_problem(override: Override, known: DictConfig) -> Problem | None:
    path = override.key_or_group
    if _has(known, path) or path.startswith("hydra.sweeper.params."):
        return None
    parent = path.rpartition(".")[0]
    siblings = [f"{parent}.{name}" for name in OmegaConf.select(known, parent)] if _has(known, parent) else []
    found = nearest(path, siblings)
    fix = (
        f"did you mean {found}?"
        if found
        else f"known keys: {', '.join(siblings) or 'hydra.sweep.dir, hydra.launcher.* and hydra.sweeper.*'}"
    )
    value = _typed_value(override)
    return Problem(path=path, rule="be a key of Hydra", value=value, fix=fix, origin=COMMAND_LINE)


def _has(config: DictConfig, path: str) -> bool:
    missing = object()
    return OmegaConf.select(config, path, default=missing, throw_on_resolution_failure=False) is not missing


def _choices(line: CommandLine) -> list[list[str]]:
    """For each override of the config, one override per value."""
    choices = []
    for override in override_parser().parse_overrides(line.overrides):
        if override.is_hydra_override():
            continue
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices.append([as_override(override)])
        elif override.is_discrete_sweep():
            choices.append([f"{key}={text}" for text in override.sweep_string_iterator()])
        else:
            choices.append([f"{key}={end!r}" for end in _values(override)])
    return choices


def _sweeps(line: CommandLine) -> Iterator[Override]:
    overrides = override_parser().parse_overrides(line.overrides)
    return (each for each in overrides if each.is_sweep_override() and not each.is_hydra_override())


def _values(override: Override) -> list[Any]:
    """The values of an override; of an interval its ends."""
    return list(interval_ends(override) if isinstance(override.value(), IntervalSweep) else override.sweep_iterator())


def as_override(override: Override) -> str:
    """An override with one value as Hydra's sweepers write it, `1e-3` as `0.001`: overrides identify a job."""
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def interval_ends(override: Override) -> tuple[int | float, int | float]:
    """Both ends of an interval, which Hydra parses as floats; as integers for an integer key."""
    value = override.value()
    assert isinstance(value, IntervalSweep) and value.start is not None and value.end is not None
    low, high = value.start, value.end
    key = keys().get(override.key_or_group)
    # `interval(1,8)` of an integer key must not produce fractions.
    if key is not None and key.type is int and float(low).is_integer() and float(high).is_integer():
        return int(low), int(high)
    return low, high


def _typed_value(override: Override) -> str:
    return str(override.input_line).partition("=")[2]
