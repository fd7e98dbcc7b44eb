"""Parses the overrides of a command line and reports all problems at once.

Hydra stops at the first problem and then advises to append the misspelt key with `+`. So every override is parsed here
first, with Hydra's grammar, and only valid ones are passed to Hydra. Keys are written as `++key=value`, because the
YAML files contain differences only and Hydra would reject a key that none of them names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_origin

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, Sweep
from hydra.errors import HydraException

from rlscale.config.foreign_words import VALUE_WORDS, find_foreign
from rlscale.config.hydra.grammar import explain_value, is_parsable, shell_quoted
from rlscale.config.hydra.internals import override_parser
from rlscale.config.hydra.typed_texts import quote_texts
from rlscale.config.hydra.written_overrides import write_override
from rlscale.config.keys import Key, find_key, nodes
from rlscale.config.passthrough import is_passthrough
from rlscale.config.problems import ALL_KEYS, COMMAND_LINE, corrected_text, nearest, not_a_group, show
from rlscale.config.schema import type_problem
from rlscale.config.unknown_keys import (
    advice_without_key,
    from_model,
    nearest_key,
    nearest_target,
    note,
    unknown_key,
)
from rlscale.errors import Problem

DEFAULT_EXPERIMENT = "quickstart"

PLAIN_OVERRIDE = "write <group>.<key>=<value> or <group>=<option>"
"""Advice for an argument that resembles no key, group or option."""

SINGLE_VALUE_RULE = "have one value in a single run"
"""The rule that overrides of a sweep break in a single run."""

MAX_JOBS = 10_000
"""Each job of a sweep is composed and checked before the first one starts, which takes milliseconds."""

# Groups that are in no defaults list, with their position for Hydra (other overrides have 1): a later one wins.
_APPENDED_GROUPS = {"experiment": 0, "on": 2}
_GROUPS_OF_LISTS = ("logging",)  # each option adds a tracker


@dataclass(kw_only=True, slots=True)
class CommandLine:
    """The parsed overrides of a command line.

    `broken` contains the keys and groups (`ALL_KEYS`: all) with an unreliable value because their override is invalid.
    Rules that read them are skipped: they would only report consequences.
    """

    overrides: list[str] = field(default_factory=list)  # in the form that Hydra needs
    keys: set[str] = field(default_factory=set)  # keys that were set by name
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    experiment: str | None = None
    no_experiment: bool = False  # requested by experiment=null
    warnings: list[str] = field(default_factory=list)


def parse_command_line(
    overrides: Sequence[str], groups: Mapping[str, Sequence[str]], *, multirun: bool = False
) -> CommandLine:
    """Checks syntax, keys, group options and types of all overrides.

    Args:
        overrides: as the user typed them, e.g. `algo=gspo`, `+on=cpu`, `algo.eps_clip=0.1`.
        groups: the options of every group.
        multirun: whether an override may have several values (`a=1,2`).
    """
    line = CommandLine()
    parser = override_parser()
    ordered: list[tuple[int, str]] = []
    for text in _separated(line, overrides, groups, multirun):
        try:
            override = parser.parse_override(text)
        except HydraException:
            _report_unparsable(line, text, groups)
            continue
        if not override.key_or_group:
            line.problems.append(_not_key_value(text, groups))
        elif override.is_hydra_override():
            ordered.append((1, text))
            if not multirun and re.match(r"hydra[./](launcher|sweeper|sweep)\b", override.key_or_group):
                line.warnings.append(f"{override.key_or_group} has no effect without -m")
            elif override.key_or_group == "hydra.run.dir":
                line.warnings.append("hydra.run.dir has no effect; the folder of a run is run.dir")
        elif override.is_sweep_override() and not multirun:
            line.broken.add(override.key_or_group)
            line.problems.append(_not_a_sweep(override, groups))
        elif (number := count_values(override)) == 0 or number > MAX_JOBS:
            line.broken.add(override.key_or_group)
            line.problems.append(_not_enumerable(override, number))
        elif override.key_or_group in groups:
            choice = _group_override(line, override, groups)
            if choice is not None:
                position = _APPENDED_GROUPS.get(override.key_or_group, 1)
                # Of several experiments or overlays the last one counts; Hydra itself replaces options of other groups.
                ordered = [pair for pair in ordered if pair[0] != position or position == 1]
                ordered.append((position, choice))
        elif _check_key(line, override, groups):
            ordered.append((1, f"++{override.key_or_group}={_plain_value(override)}"))
    if line.experiment is None and not line.no_experiment and ALL_KEYS not in line.broken:
        line.experiment = DEFAULT_EXPERIMENT
        ordered.append((0, f"+experiment={DEFAULT_EXPERIMENT}"))
    line.warnings += _repeated(overrides)
    line.overrides = [text for _, text in sorted(ordered, key=lambda pair: pair[0])]
    return line


def _separated(
    line: CommandLine, overrides: Sequence[str], groups: Mapping[str, Sequence[str]], multirun: bool
) -> list[str]:
    """The overrides without those that a shell divided, `a= 1`, or that quotes made one, `'a=1 b=2'`: both reported."""
    kept, remaining = [], list(overrides)
    while remaining:
        text = remaining.pop(0)
        (whole, taken), parts = _with_following(text, remaining), text.split()
        name = whole.partition("=")[0].lstrip("+~")
        key = find_key(name)
        if taken and (key or name in groups):
            typed = " ".join([text, *remaining[:taken]])
            del remaining[:taken]
            fix = f"write {shell_quoted(whole)}"
            found = parse_command_line([whole], groups, multirun=multirun).problems or [
                Problem(path=name, rule="have no space around its =", value=f'"{typed}"', fix=fix, origin=COMMAND_LINE)
            ]
        elif len(parts) > 1 and key and key.type is not str and all(_is_override(part, groups) for part in parts):
            fix = f"write {text} without the quotes around it"
            rule = "be a separate argument"
            found = [Problem(path=name, rule=rule, value=f'"{text}"', fix=fix, origin=COMMAND_LINE)]
        else:
            kept.append(text)
            continue
        line.problems += found
        line.broken.add(_nearest_target(name, groups))
    return kept


def _with_following(text: str, after: Sequence[str]) -> tuple[str, int]:
    """An override with the arguments behind it that belong to it, the `=` and the value, and their number."""
    taken = 0
    if "=" not in text and after and after[0].startswith("="):
        text, taken = text + after[0], 1
    if text.endswith("=") and len(after) > taken and "=" not in after[taken] and not after[taken].startswith("--"):
        text, taken = text + after[taken], taken + 1
    return text, taken


def _is_override(text: str, groups: Mapping[str, Sequence[str]]) -> bool:
    """Whether a text sets a key or selects an option."""
    name, equals, value = text.partition("=")
    return bool(equals and value) and (find_key(name) is not None or name in groups)


def _repeated(overrides: Sequence[str]) -> list[str]:
    """Warnings about keys and groups that are given several times. Without their values: one may be a secret."""
    given = Counter(text.partition("=")[0].lstrip("+") for text in overrides if "=" in text)
    return [f"{name} is given {number} times; the last one is used" for name, number in given.items() if number > 1]


def _report_unparsable(line: CommandLine, text: str, groups: Mapping[str, Sequence[str]]) -> None:
    """Reports an override without `=`, or with a value that Hydra cannot parse."""
    name, equals, value = text.partition("=")
    path = name.lstrip("+~ ").rstrip()
    if text.startswith("--") or not equals or not path:
        line.problems.append(_not_key_value(text, groups))
        return
    line.broken.add(_nearest_target(path, groups))
    key = find_key(path)
    if key is None and path not in groups and not is_passthrough(path) and not path.startswith("hydra."):
        line.problems.append(_unknown_path(path, value, groups))
        return
    # Only the space is wrong: the rest can be parsed.
    if is_parsable(f"{path}={value.strip()}"):
        rule, fix = "have no space next to its name", f"write {shell_quoted(f'{path}={value.strip()}')}"
        value = f'"{text}"'
    elif path in groups:
        line.problems.append(_wrong_option(path, value, groups[path]))
        return
    else:
        rule, fix = explain_value(path, value, key if key is None or path == key.path else None)
    line.problems.append(Problem(path=path, rule=rule, value=value, fix=fix, origin=COMMAND_LINE))


def _not_key_value(text: str, groups: Mapping[str, Sequence[str]]) -> Problem:
    name, equals, value = text.partition("=")
    if not equals:
        # `key: value`, as in YAML.
        name, _, value = text.partition(":")
    fix = PLAIN_OVERRIDE
    group_of = next((group for group, options in groups.items() if name in options), None)
    # `--experiment quickstart`, and `--config-name quickstart` of Hydra.
    flag = {"--config-name": "experiment"}.get(name, name.lstrip("-"))
    if name in groups:
        fix = f"write {name}=<{'|'.join(groups[name])}>"
    elif name.startswith("-") and value.strip() in groups.get(flag, ()):
        fix = f"did you mean {flag}={value.strip()}?"
    elif name == "--config-name":
        fix = f"write experiment={nearest(value, groups.get('experiment', ())) or '<name>'}"
    elif name == "--config-path":
        fix = "write --config-dir <folder>"
    elif group_of:
        fix = f"did you mean {group_of}={name}?"
    elif not text.startswith("-") and (near := nearest(name, groups.get("experiment", ()))):
        fix = f"did you mean experiment={near}?"
    elif advice := from_model(name) or advice_without_key(name):
        fix = advice
    elif (found := nearest_target(name))[0]:
        key, fixed = str(found[0]), found[1]
        typed = value.strip() if equals or value.strip() else None
        fix = f"did you mean {write_override(key, typed if fixed is None else fixed)}?{note(name)}"
    shown = text if text.strip() else f'"{text}"'
    return Problem(
        path=name.strip() or shown, rule="be written as key=value", value=shown, fix=fix, origin=COMMAND_LINE
    )


def _not_a_sweep(override: Override, groups: Mapping[str, Sequence[str]]) -> Problem:
    path, value = override.key_or_group, _value_text(override)
    key = find_key(path)
    if key is None and path not in groups and not is_passthrough(path):
        return _unknown_path(path, value, groups)
    fix = "add -m to run one job per value"
    if key is not None and (number := corrected_text(key, value)):
        fix = f"write {path}={number}, or {fix}"
    elif key is not None and key.type is str:
        quoted = shell_quoted(f'{path}="{value}"')
        fix += f", or write {quoted}"
    elif key is not None and get_origin(key.type) is list:
        fix += f", or write {path}=[{value}]"
    return Problem(path=path, rule=SINGLE_VALUE_RULE, value=value, fix=fix, origin=COMMAND_LINE)


def _group_override(line: CommandLine, override: Override, groups: Mapping[str, Sequence[str]]) -> str | None:
    """The override that selects an option in Hydra's syntax; None when it is invalid or selects nothing."""
    group = override.key_or_group
    if override.package is not None:
        fix, value = f"write {group}=<option>", str(override.input_line)
        rule = "be selected without a package"
        line.problems.append(Problem(path=group, rule=rule, value=value, fix=fix, origin=COMMAND_LINE))
        return None
    if override.is_delete() and override.value() is None and override.input_line == f"~{group}":
        line.warnings.append(f"~{group} selects no option, so its keys have their defaults; {group}=null says the same")
    if override.is_delete() or override.value() is None:
        line.no_experiment |= group == "experiment"
        return None if group in _APPENDED_GROUPS else f"~{group}"
    if not _check_options(line, override, groups[group]):
        return None
    return f"{'+' if group in _APPENDED_GROUPS else ''}{group}={_value_text(override)}"


def _check_options(line: CommandLine, override: Override, options: Sequence[str]) -> bool:
    group = override.key_or_group
    selected = [name for value in _values(override) for name in (value if isinstance(value, list) else [value])]
    # Hydra accepts a list of options for a group.
    wrong = [name for name in selected if name not in options]
    line.problems += [_wrong_option(group, name, options) for name in wrong]
    # Hydra would merge the options of a list into a mixture that has no name.
    several = any(isinstance(value, list) for value in _values(override))
    if several and not wrong and group not in (*_APPENDED_GROUPS, *_GROUPS_OF_LISTS):
        line.problems.append(_several_options(group, selected))
        wrong = selected
    if wrong:
        line.broken.add(ALL_KEYS if group in _APPENDED_GROUPS else group)
    elif group == "experiment":
        line.experiment = "+".join(str(name) for name in selected)
    return not wrong


def _several_options(group: str, selected: Sequence[Any]) -> Problem:
    names = [str(name) for name in selected]
    fix = f"write {group}={names[0]}; {group}={','.join(names)} with -m runs one job for each"
    rule, value = "be one of its options, not several", f"[{','.join(names)}]"
    return Problem(path=group, rule=rule, value=value, fix=fix, origin=COMMAND_LINE)


_KEY_OF_GROUP = {
    **{"train": "train.backend", "rollout": "rollout.engine", "algo": "algo.advantage_estimator"},
    **{"optim": "optim.name", "reward": "reward.type"},
}
"""The key that differs between the options of a group; its values have names in other projects."""

_PATH_OF_GROUP = {"model": "model.hf_checkpoint", "data": "data.prompt_data", "eval": "eval.prompt_data"}


def _wrong_option(group: str, name: Any, options: Sequence[str]) -> Problem:
    word = VALUE_WORDS.get(_KEY_OF_GROUP.get(group, ""), {}).get(str(name).lower())
    found = nearest(str(name), options) or (word if word in options else None)
    fix = (f"did you mean {found}? " if found else "") + f"options: {', '.join(options)}"
    # A path or the name of a model on the hub is a value of a key, not an option.
    if not found and group in _PATH_OF_GROUP and isinstance(name, str) and ("/" in name or ".json" in name):
        fix = f"did you mean {write_override(_PATH_OF_GROUP[group], name)}? {fix}"
    elif not found and word:
        fix = f"did you mean {_KEY_OF_GROUP[group]}={word}? {fix}"
    elif not found and group == "reward" and re.fullmatch(r"[\w./]+:\w+", str(name)):
        fix = f"did you mean reward.custom_path={name}? {fix}"
    return Problem(path=group, rule="be one of its options", value=show(name), fix=fix, origin=COMMAND_LINE)


def _check_key(line: CommandLine, override: Override, groups: Mapping[str, Sequence[str]]) -> bool:
    path = override.key_or_group
    key = find_key(path)
    if is_passthrough(path) and not override.is_delete():
        line.keys.add(path)  # check_fields checks whether the library knows it
        return True
    if key is None:
        line.problems.append(_unknown_path(path, _value_text(override), groups))
        line.broken.add(_nearest_target(path, groups))
        return False
    if override.is_delete():
        fix = f"set it to its default, {path}={show(key.default)}"
        line.problems.append(
            Problem(path=path, rule="not be deleted", value=str(override.input_line), fix=fix, origin=COMMAND_LINE)
        )
        return False
    # Entries of a mapping have any type.
    found = [type_problem(key, value, origin=COMMAND_LINE) for value in _values(override)] if path == key.path else []
    problems = [problem for problem in found if problem]
    if readings := _readings_of_point(key, _value_text(override)):
        fix = f"write {' or '.join(f'{path}={number}' for number in readings)}"
        problems = [replace(problem, fix=fix) for problem in problems]
    line.problems.extend(problems)
    (line.broken if problems else line.keys).add(key.path)
    return not problems


def _readings_of_point(key: Key, text: str) -> list[int]:
    """The integers that `1.000` may stand for: a decimal point, or one between thousands."""
    if key.type is not int or not re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+", text):
        return []
    readings = [int(text.replace(".", ""))]
    if text.count(".") == 1 and float(text).is_integer():
        readings.insert(0, int(float(text)))
    return [number for number in readings if key.allows(number)]


def _unknown_path(path: str, value: Any, groups: Mapping[str, Sequence[str]]) -> Problem:
    if path in nodes():
        return not_a_group(path, value, origin=COMMAND_LINE)
    group = _nearest_group(path, groups)
    if group:
        # Of several values, or one that is no option, the advice would be refused in turn.
        option = str(value).partition(",")[0]
        found = option if option in groups[group] else nearest(option, groups[group])
        fix = f"did you mean {group}{f'={found}' if found else ''}? options: {', '.join(groups[group])}"
        return Problem(path=path, rule="be a known group", value=show(value), fix=fix, origin=COMMAND_LINE)
    return unknown_key(path, value, origin=COMMAND_LINE)


def _nearest_target(path: str, groups: Mapping[str, Sequence[str]]) -> str:
    """The key or group that an invalid override most likely should set; its value is unknown."""
    group = _nearest_group(path, groups)
    if find_key(path) is None and "." in path and group is None:
        return nearest_key(path) or path
    return path if group is None else ALL_KEYS if group in _APPENDED_GROUPS else group


def _nearest_group(path: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """The group that an unknown path most likely stands for. A dot may be the one wrong letter."""
    if "." not in path:
        # A word of another project, e.g. `experiment_name`, is no misspelt group.
        return None if find_foreign(path.lower()) else nearest(path, groups)
    return nearest(path, groups, limit=1) if find_key(path) is None else None


def count_values(override: Override) -> float:
    """The number of values of an override, without enumerating them; those of an interval count as one."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1
    assert value.start is not None and value.stop is not None
    # With a step of 0, and between infinite ends, Hydra would never finish, or fail.
    number = (value.stop - value.start) / value.step if value.step else math.inf
    return max(0, math.ceil(number)) if math.isfinite(number) else math.inf


def _not_enumerable(override: Override, number: float) -> Problem:
    path, value = override.key_or_group, _value_text(override)
    if number == 0:
        rule, fix = "have at least one value in a sweep", "correct the ends and the sign of the step"
    else:
        rule = f"have at most {MAX_JOBS} values in a sweep"
        fix = "write a larger step; or interval(<low>,<high>) with hydra/sweeper=optuna, which chooses among all values"
    return Problem(path=path, rule=rule, value=value, fix=fix, origin=COMMAND_LINE)


def _value_text(override: Override) -> str:
    """The value as it was typed."""
    return str(override.input_line).partition("=")[2]


def _plain_value(override: Override) -> str:
    """The value for Hydra: as it was typed, with the texts that Hydra would read as numbers in quotes."""
    key, typed = find_key(override.key_or_group), _value_text(override)
    return typed if key is None else quote_texts(key, override.value(), typed)


def _values(override: Override) -> list[Any]:
    """Every value of an override: one, or those of a sweep over a list."""
    value = override.value()
    if not isinstance(value, Sweep):
        return [value]
    return list(override.sweep_iterator()) if override.is_discrete_sweep() else []
