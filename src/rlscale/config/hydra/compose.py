"""Composes the YAML files and the command line with Hydra, and records the origin of each value."""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders, short_path
from rlscale.config.hydra.hydra_overrides import failed_override
from rlscale.config.hydra.internals import YamlLoader, apply_overrides, compose_app, make_loader, override_parser
from rlscale.config.hydra.typed_texts import restore_texts
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS, YamlFiles, read_yaml_files, set_nested, value_of
from rlscale.config.keys import keys, nodes
from rlscale.config.problems import ALL_KEYS, COMMAND_LINE
from rlscale.errors import Problem


@dataclass(kw_only=True)
class Composed:
    """Nested values of the YAML files and the command line, unchecked, with unresolved interpolations.

    `problems` are those of files and of overrides of Hydra's own settings. If they stop Hydra from composing, the
    values are those of the readable files, and the values of the keys and groups in `broken` are unreliable.
    """

    values: dict[str, Any]
    overrides: Sequence[str]
    command_line_keys: set[str]
    folders: ConfigFolders = field(repr=False)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    read: YamlFiles | None = field(default=None, repr=False)  # None: composed by Hydra

    def is_given(self, path: str) -> bool:
        """Whether the user gave the value of `path`: on the command line, or in a file outside of rlscale."""
        origin = self.origin(path)
        return bool(origin) and not origin.startswith(short_path(self.folders.main))

    def origin(self, path: str) -> str:
        """The origin of the value of `path`: `command line`, a file and line, or empty for a default."""
        if any(path == key or path.startswith(f"{key}.") for key in self.command_line_keys):
            return COMMAND_LINE
        if self.read is not None:
            return self.read.origin(path)
        found = ""
        for package, file in self._files:
            relative = path.removeprefix(f"{package}.") if package else path
            # The file sets another package.
            if package and relative == path:
                continue
            line = _find_line(file, relative.split("."))
            found = f"{short_path(file)}:{line}" if line else found
        return found

    def find_node(self, path: str) -> yaml.Node | None:
        """The value of `path` in the file that applies; None when the command line set it, or no file did."""
        # `command_line_keys` has a whole mapping where one of its entries was set.
        if any(_sets(override, path) for override in self.overrides if override.startswith("++")):
            return None
        found = None
        for package, file in self._files:
            relative = path.removeprefix(f"{package}.") if package else path
            if (not package or relative != path) and (pair := _find_pair(file, relative.split("."))):
                found = pair[1]
        return found

    def file_values(self, path: str) -> list[tuple[Any, Path, int]]:
        """The values that files give to `path`, each with its file and line; the last one applies."""
        if self.read is not None:
            return self.read.values_of(path)
        found = []
        for package, file in self._files:
            relative = path.removeprefix(f"{package}.") if package else path
            if (not package or relative != path) and (pair := _find_pair(file, relative.split("."))):
                key, value = pair
                found.append((value_of(value), file, key.start_mark.line + 1))
        return found

    @cached_property
    def _files(self) -> Sequence[tuple[str, Path]]:
        """Package and file of every composed option, in the order of merging."""
        options = tuple(override for override in self.overrides if not override.startswith("++"))
        return _option_files(options, self.folders, self.folders.state())


def _sets(override: str, path: str) -> bool:
    """Whether an override of a key gives `path` its value. A mapping sets its entries only."""
    name = override.lstrip("+").partition("=")[0]
    if not path.startswith(f"{name}."):
        return path == name
    value: Any = override_parser().parse_override(override).value()
    for part in path.removeprefix(f"{name}.").split("."):
        if not isinstance(value, Mapping):
            return True
        if part not in map(str, value):
            return False
        value = next(each for key, each in value.items() if str(key) == part)
    return True


def _option_files(options: Sequence[str], folders: ConfigFolders, state: Hashable) -> Sequence[tuple[str, Path]]:
    """Package and file of the options that `options` select; `state` changes when a file does."""
    defaults = _compose_options(options, folders, state).defaults
    found = ((item.package or "", folders.find_file(str(item.config_path))) for item in defaults)
    return tuple((package, file) for package, file in found if file is not None)


def compose(overrides: Sequence[str], *, command_line_keys: set[str], folders: ConfigFolders) -> Composed:
    """Composes the overrides of `parse_command_line`; without Hydra, file by file, when Hydra fails."""
    kept, problems = list(overrides), list[Problem]()
    try:
        nested = _compose_options_once(kept, folders) or _plain(_load(kept, problems, folders))
    except FAILURES as error:
        return _read_without_hydra(kept, command_line_keys, folders, problems=problems, error=error)
    # A file that sets its own group lacks the package line; a dotted name would override the command line.
    if any(group in nested for group in GLOBAL_GROUPS) or _has_unusual_key(nested, ""):
        return _read_without_hydra(kept, command_line_keys, folders, problems=problems)
    composed = Composed(
        values=nested, overrides=kept, command_line_keys=command_line_keys, folders=folders, problems=problems
    )
    restore_texts(nested, composed.find_node)
    return composed


def _compose_options_once(overrides: Sequence[str], folders: ConfigFolders) -> dict[str, Any] | None:
    """Sets the keys of `overrides` in the values of their options, which Hydra composes once per process.

    Makes the configs of a sweep, which differ in keys only, several times as fast. None when only Hydra can do it.
    """
    options = tuple(override for override in overrides if not override.startswith("++"))
    if any(override.lstrip("+~").startswith("hydra") for override in overrides):
        return None
    values = copy.deepcopy(_compose_options(options, folders, folders.state()).values)
    parsed = override_parser().parse_overrides([text for text in overrides if text.startswith("++")])
    for number, override in enumerate(parsed):
        path, value = override.key_or_group, override.value()
        # Hydra merges mappings, and OmegaConf rejects what is not an interpolation.
        if not _is_literal(value) or not _is_free(values, path):
            try:
                return _plain(apply_overrides(values, parsed[number:]))
            except FAILURES:
                return None
        set_nested(values, path, value)
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The values of the YAML files that options select, and these files in the order of merging."""

    values: dict[str, Any]
    defaults: Sequence[ResultDefault]


@lru_cache(maxsize=256)
def _compose_options(options: Sequence[str], folders: ConfigFolders, state: Hashable) -> _Options:
    """Composes the YAML files that `options` select; `state` changes when one of the files does."""
    loader = make_loader(folders)
    composed = compose_app(loader, options)
    if composed is None:
        config = loader.load_configuration(PRIMARY, list(options), RunMode.RUN)
        defaults = loader.compute_defaults_list(PRIMARY, list(options), RunMode.RUN).defaults
    else:
        config, defaults = composed
    return _Options(values=_plain(config), defaults=defaults)


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    # YAML reads the name `on` as true.
    return {"on" if name is True else str(name): value for name, value in values.items() if name != "hydra"}


def _is_literal(value: Any) -> bool:
    """Whether OmegaConf keeps a value as it is."""
    if isinstance(value, list):
        return all(_is_literal(each) for each in value)
    return value is None or (isinstance(value, bool | int | float | str) and "${" not in str(value))


def _is_free(values: Mapping[str, Any], path: str) -> bool:
    """Whether a value can be set at `path` without replacing a mapping, or a value on the way to it."""
    for name in path.split("."):
        if not isinstance(values, dict) or not name.isidentifier():
            return False
        values = values.get(name, {})
    return not (isinstance(values, dict) and values)


def _has_unusual_key(values: Mapping[str, Any], prefix: str) -> bool:
    """Whether a key inside a group is no text, or contains a dot, which neither Hydra nor OmegaConf splits."""
    return any(
        not isinstance(name, str)
        or "." in name
        or (isinstance(value, Mapping) and f"{prefix}{name}" in nodes() and _has_unusual_key(value, f"{prefix}{name}."))
        for name, value in values.items()
    )


FAILURES = (HydraException, RecursionError, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)
"""Errors of Hydra, OmegaConf and YAML about files and overrides."""


def _load(overrides: list[str], problems: list[Problem], folders: ConfigFolders) -> DictConfig:
    """Composes with Hydra. Removes an unknown override of Hydra's own settings from `overrides` and reports it."""
    loader = make_loader(folders)
    # Hydra reports one problem per call, so retry without the override that failed.
    while True:
        try:
            return loader.load_configuration(PRIMARY, list(overrides), RunMode.RUN)
        except (HydraException, OmegaConfBaseException) as error:
            found = failed_override(error, overrides)
            if found is None:
                raise
            override, problem = found
            overrides.remove(override)
            problems.append(problem)


def _read_without_hydra(
    overrides: Sequence[str],
    command_line_keys: set[str],
    folders: ConfigFolders,
    *,
    problems: list[Problem],
    error: Exception | None = None,
) -> Composed:
    parsed = override_parser().parse_overrides(list(overrides))
    # parse_command_line writes keys as `++key=value`; all other overrides select options.
    of_keys = [override for override in parsed if str(override.input_line).startswith("++")]
    choices = [
        choice
        for override in parsed
        if override not in of_keys and not override.is_hydra_override() and not override.is_delete()
        for choice in _choices(override)
    ]
    # The values must be complete enough to check the rest of the config.
    read = read_yaml_files(choices, folders)
    values = read.values()
    for override in of_keys:
        set_nested(values, override.key_or_group, override.value())
    found = read.problems or ([] if error is None else _composing_problem(error, read))
    return Composed(
        values=values,
        overrides=overrides,
        command_line_keys=command_line_keys,
        folders=folders,
        problems=problems + found,
        broken={problem.path if problem.path in nodes() | keys().keys() else ALL_KEYS for problem in found},
        read=read,
    )


def _choices(override: Override) -> list[tuple[str, str]]:
    """Group and option of an override; several when its value is a list."""
    value: Any = override.value()
    return [(override.key_or_group, str(name)) for name in (value if isinstance(value, list) else [value])]


def _composing_problem(error: Exception, read: YamlFiles) -> list[Problem]:
    """The message of Hydra or OmegaConf without their advice, which does not apply to these files.

    Empty when it concerns a key of the config: the check of its value reports it.
    """
    # OmegaConf adds the full key to its message only, not to an attribute of Hydra's exception.
    named = re.search(r"full_key: (\S+)", f"{error}\n{error.__cause__}")
    path = named.group(1) if named else "config"
    if path in keys():
        return []
    lines = str(error).splitlines()
    message = next((line for line in lines if line.startswith("Key ")), lines[0])
    rule = "be accepted by Hydra" if path.startswith("hydra.") else "be composable by Hydra"
    fix = "correct the file; those in conf/ are examples of each kind"
    return [Problem(path=path, rule=rule, value=f'"{message}"', fix=fix, origin=read.origin(path))]


def _find_line(file: Path, names: Sequence[str]) -> int | None:
    """1-based line where a YAML file sets the nested key; None when it does not."""
    pair = _find_pair(file, names)
    return pair[0].start_mark.line + 1 if pair else None


def _find_pair(file: Path, names: Sequence[str]) -> tuple[yaml.Node, yaml.Node] | None:
    """The nodes of a nested key and of its value in a YAML file; None when it does not set the key."""
    node, pair = _root(file, file.stat().st_mtime_ns), None
    for name in names:
        if not isinstance(node, yaml.MappingNode):
            return None
        pair = next((pair for pair in node.value if pair[0].value == name), None)
        if pair is None:
            return None
        node = pair[1]
    return pair


@lru_cache(maxsize=256)
def _root(file: Path, changed_ns: int) -> yaml.Node | None:
    """The parsed file; `changed_ns` is the time of its last change."""
    return yaml.compose(file.read_text(encoding="utf-8"), Loader=YamlLoader)
