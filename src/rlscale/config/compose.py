"""Hydra composes the YAML files and the command line; says afterwards where a value came from."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlscale.config.folder import PRIMARY, ConfigFolders
from rlscale.config.problems import COMMAND_LINE
from rlscale.errors import ConfigError, Problem


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
    """Nested values as the YAML files and the command line give them, unchecked, interpolations not yet resolved."""

    values: dict[str, Any]
    words: Sequence[str]
    command_line_keys: set[str]
    folders: ConfigFolders = field(repr=False)

    def origin(self, path: str) -> str:
        """Where the value of `path` was set: `command line`, a file and line, or nothing when it is the default."""
        if any(path == key or path.startswith(f"{key}.") for key in self.command_line_keys):
            return COMMAND_LINE
        found = ""
        for package, file in self._files:
            relative = path.removeprefix(f"{package}.") if package else path
            if package and relative == path:
                continue
            line = _find_line(file, relative.split("."))
            found = f"{_short(file)}:{line}" if line else found
        return found

    @cached_property
    def _files(self) -> list[tuple[str, Path]]:
        """Package and file of everything that was composed, in the order of merging."""
        defaults = make_loader(self.folders).compute_defaults_list(PRIMARY, list(self.words), RunMode.RUN).defaults
        found = ((item.package or "", self.folders.find_file(str(item.config_path))) for item in defaults)
        return [(package, file) for package, file in found if file is not None]


def compose(words: Sequence[str], *, command_line_keys: set[str], folders: ConfigFolders) -> Composed:
    """Composes what `parse_command_line` made ready.

    Raises: ConfigError when a YAML file cannot be read or names an option that does not exist.
    """
    try:
        config = make_loader(folders).load_configuration(PRIMARY, list(words), RunMode.RUN)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_yaml_problem(error)]) from error
    except MissingConfigException as error:
        raise ConfigError([_missing_problem(error, folders)]) from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())
        raise ConfigError([Problem(path="config", rule="be composable by Hydra", value=f'"{text}"')]) from error
    with open_dict(config):
        del config["hydra"]
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    nested = {str(name): value for name, value in values.items()}
    return Composed(values=nested, words=words, command_line_keys=command_line_keys, folders=folders)


def _yaml_problem(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark
    file = _short(Path(mark.name)) if mark else "a YAML file"
    origin = f"{file}:{mark.line + 1}" if mark else ""
    return Problem(path=file, rule="be valid YAML", value=f'"{error.problem}"', origin=origin)


def _missing_problem(error: MissingConfigException, folders: ConfigFolders) -> Problem:
    missing = str(error.missing_cfg_file)
    group, _, name = missing.rpartition("/")
    options = ", ".join(folders.groups().get(group, ()))
    return Problem(
        path=group or missing,
        rule="be one of its options",
        value=name,
        fix=f"options: {options}" if options else "",
        origin=_find_choice(group, name, folders),
    )


def _find_choice(group: str, name: str, folders: ConfigFolders) -> str:
    """The file and line whose defaults list chooses an option; Hydra names the file that was overridden instead."""
    choice = re.compile(rf"^\s*-\s*(override\s+)?/?{re.escape(group)}\s*:\s*{re.escape(name)}\s*$")
    for file in sorted(path for root in folders.paths for path in root.rglob("*.yaml")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if choice.match(line):
                return f"{_short(file)}:{number}"
    return ""


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


def _short(file: Path) -> str:
    """Relative to the working folder where it lies below it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
