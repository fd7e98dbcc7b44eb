"""Hydra composes the YAML files and the command line; says afterwards where a value came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlscale.config.errors import ALL_KEYS, COMMAND_LINE
from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders, short_path
from rlscale.config.hydra.hydra_overrides import wrong_word
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS, YamlFiles, put_value, read_yaml_files
from rlscale.config.keys import keys, nodes
from rlscale.errors import Problem


def make_loader(folders: ConfigFolders) -> ConfigLoaderImpl:
    """Hydra's loader itself, not `hydra.compose`: it needs no global state, so it may run inside a sweep's job."""
    version.setbase("1.3")
    search_path = create_config_search_path(str(folders.main))
    if folders.extra is not None:
        search_path.append(
            "command-line", f"file://{folders.extra}", anchor=SearchPathQuery(provider="main", path=None)
        )
    return ConfigLoaderImpl(search_path)


@dataclass(kw_only=True)
class Composed:
    """Nested values as the YAML files and the command line give them, unchecked, interpolations not yet resolved.

    `problems` is what was wrong with files and with words for Hydra itself; where they kept Hydra from composing, the
    values are those of the files that can be read, and those of the keys and groups in `broken` cannot be relied on.
    """

    values: dict[str, Any]
    words: Sequence[str]
    command_line_keys: set[str]
    folders: ConfigFolders = field(repr=False)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    read: YamlFiles | None = field(default=None, repr=False)  # None: Hydra composed

    def origin(self, path: str) -> str:
        """Where the value of `path` was set: `command line`, a file and line, or nothing when it is the default."""
        if any(path == key or path.startswith(f"{key}.") for key in self.command_line_keys):
            return COMMAND_LINE
        if self.read is not None:
            return self.read.origin(path)
        found = ""
        for package, file in self._files:
            relative = path.removeprefix(f"{package}.") if package else path
            if package and relative == path:
                continue
            line = _find_line(file, relative.split("."))
            found = f"{short_path(file)}:{line}" if line else found
        return found

    @cached_property
    def _files(self) -> list[tuple[str, Path]]:
        """Package and file of everything that was composed, in the order of merging."""
        defaults = make_loader(self.folders).compute_defaults_list(PRIMARY, list(self.words), RunMode.RUN).defaults
        found = ((item.package or "", self.folders.find_file(str(item.config_path))) for item in defaults)
        return [(package, file) for package, file in found if file is not None]


def compose(words: Sequence[str], *, command_line_keys: set[str], folders: ConfigFolders) -> Composed:
    """Composes what `parse_command_line` made ready, as far as it can be."""
    kept, problems = list(words), list[Problem]()
    try:
        config = _load(kept, problems, folders)
    except _FAILURES as error:
        return _read_without_hydra(kept, command_line_keys, folders, problems=problems, error=error)
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    nested = {str(name): value for name, value in values.items() if name != "hydra"}
    # A file that sets its own group has no package line; a dotted name would win over the command line's.
    if any(group in nested for group in GLOBAL_GROUPS) or _has_dotted(nested, ""):
        return _read_without_hydra(kept, command_line_keys, folders, problems=problems)
    return Composed(values=nested, words=kept, command_line_keys=command_line_keys, folders=folders, problems=problems)


def _has_dotted(values: Mapping[str, Any], prefix: str) -> bool:
    """Whether a key of a group is written with a dot, which neither Hydra nor OmegaConf splits."""
    return any(
        "." in name
        or (isinstance(value, Mapping) and f"{prefix}{name}" in nodes() and _has_dotted(value, f"{prefix}{name}."))
        for name, value in values.items()
    )


_FAILURES = (HydraException, RecursionError, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)


def _load(words: list[str], problems: list[Problem], folders: ConfigFolders) -> DictConfig:
    """Lets Hydra compose. A word for Hydra itself that it does not know is taken out and told."""
    loader = make_loader(folders)
    while True:
        try:
            return loader.load_configuration(PRIMARY, list(words), RunMode.RUN)
        except (HydraException, OmegaConfBaseException) as error:
            found = wrong_word(error, words)
            if found is None:
                raise
            word, problem = found
            words.remove(word)
            problems.append(problem)


def _read_without_hydra(
    words: Sequence[str],
    command_line_keys: set[str],
    folders: ConfigFolders,
    *,
    problems: list[Problem],
    error: Exception | None = None,
) -> Composed:
    overrides = OverridesParser.create().parse_overrides(list(words))
    keys_of = [override for override in overrides if str(override.input_line).startswith("++")]
    choices = [
        choice
        for override in overrides
        if override not in keys_of and not override.is_hydra_override() and not override.is_delete()
        for choice in _choices(override)
    ]
    read = read_yaml_files(choices, folders)
    values = read.values()
    for override in keys_of:
        put_value(values, override.key_or_group, override.value())
    found = read.problems or ([] if error is None else _composing_problem(error, read))
    return Composed(
        values=values,
        words=words,
        command_line_keys=command_line_keys,
        folders=folders,
        problems=problems + found,
        broken={problem.path if problem.path in nodes() | keys().keys() else ALL_KEYS for problem in found},
        read=read,
    )


def _choices(override: Override) -> list[tuple[str, str]]:
    """Group and option of a word; several where it has a list."""
    value: Any = override.value()
    return [(override.key_or_group, str(name)) for name in (value if isinstance(value, list) else [value])]


def _composing_problem(error: Exception, read: YamlFiles) -> list[Problem]:
    """What Hydra or OmegaConf says, without their advice, which is about other ways to write a config.

    Nothing where it speaks of one of our keys: what is wrong with its value is told when the values are checked.
    """
    named = re.search(r"full_key: (\S+)", f"{error}\n{error.__cause__}")
    path = named.group(1) if named else "config"
    if path in keys():
        return []
    said = next((line for line in str(error).splitlines() if line.startswith("Key ")), str(error).splitlines()[0])
    rule = "be what Hydra takes" if path.startswith("hydra.") else "be composable by Hydra"
    fix = "mend the file; those of conf/ show how each kind is written"
    return [Problem(path=path, rule=rule, value=f'"{said}"', fix=fix, origin=read.origin(path))]


def _find_line(file: Path, names: Sequence[str]) -> int | None:
    """1-based line on which a YAML file sets the nested key; None when it does not."""
    node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    line = None
    for name in names:
        if not isinstance(node, yaml.MappingNode):
            return None
        pair = next((pair for pair in node.value if pair[0].value == name), None)
        if pair is None:
            return None
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
