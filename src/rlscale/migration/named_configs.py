"""Config files that a command names: `--config-name` and `--config-path` of verl, `--config` of TRL, roles of slime.

Their values come before the arguments of the command, which override them; those of slime's roles come after them.
Files are looked up next to the script, in the config path and in the current folder; a file that is not there is
reported by the translation of its argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from rlscale.migration.config_files import SUFFIXES, compose_file, file_arguments
from rlscale.migration.foreign_arguments import Argument, Project, Reading
from rlscale.migration.shell_values import Source, literal

OWN_CONFIG = re.compile(r"(?:ppo|ppo_megatron|sft|sft_trainer_engine|dapo|dapo_megatron)_trainer|sft_trainer_engine")
"""Names of verl's own configurations, whose values are its defaults."""

ROLES = "--megatron-config-path"
"""slime's file with values for the actor, and others for the critic."""

NAME_FLAGS, PATH_FLAGS = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")


def read_named_configs(reading: Reading, script: Path | None, given: Mapping[str, str]) -> None:
    """Puts the values of the files that a command names before its arguments.

    Args:
        script: the input; None: a bare command line.
    """
    flags = {Project.verl: NAME_FLAGS, Project.trl: ("config",), Project.slime: (ROLES,)}[reading.project]
    named = next((each for each in reversed(reading.arguments) if each.name in flags and each.value), None)
    if named is None or Path(named.value).stem in reading.configs:
        return
    folders = list(_folders(reading, script))
    if reading.project is Project.slime:
        whole = [*reading.arguments, *_read_roles(named.value, folders, reading)]
    else:
        whole = [*_read(named.value, folders, named.source, reading, given), *reading.arguments]
    reading.arguments = [replace(argument, index=index) for index, argument in enumerate(whole)]


def _folders(reading: Reading, script: Path | None) -> Iterator[Path]:
    """Folders in which a file may lie, the most likely one first."""
    start = Path.cwd() if script is None else script.resolve().parent
    paths = [each.value for each in reading.arguments if each.name in PATH_FLAGS and each.value]
    for path in paths:
        if Path(path).is_absolute():
            yield Path(path)
        # A path often starts at the root of the checkout, which `$(pwd)` names: it is looked up in all parents.
        parts = Path(path).parts[Path(path).is_absolute() :]
        for folder in (start, *start.parents):
            yield from (folder.joinpath(*parts[skip:]) for skip in range(len(parts)))
    yield from (start, start / "config", Path.cwd())


def _read(
    name: str, folders: list[Path], source: Source, reading: Reading, given: Mapping[str, str]
) -> Iterator[Argument]:
    """The values of a file, after those of the files in its defaults list."""
    names = [name] if name.endswith(SUFFIXES) else [f"{name}.yaml", f"{name}.yml"]
    path = next((folder / each for folder in folders for each in names if (folder / each).is_file()), None)
    if path is None and reading.project is Project.trl:
        # The program of a command line may run in another folder than that of the script.
        path = next((folder / Path(name).name for folder in folders if (folder / Path(name).name).is_file()), None)
    root = None if path is None else compose_file(path)
    if path is None or root is None:
        return
    reading.configs.append(Path(name).stem)
    for below, line in _defaults(root):
        place = Source(file=str(path), line=line)
        stem = below.removesuffix(".yaml")
        if OWN_CONFIG.fullmatch(stem):
            reading.configs.append(stem)
        elif stem not in reading.configs and below != "_self_":
            before = len(reading.configs)
            yield from _read(below, [path.parent, *folders], place, reading, given)
            if len(reading.configs) == before:
                reading.notes.append((place, f"names the config {below}, which does not exist here"))
    yield from file_arguments(root, path, reading.project, given)


def _read_roles(name: str, folders: list[Path], reading: Reading) -> Iterator[Argument]:
    """The values of each role of slime: those of the actor are arguments of the command, others `<role>.<name>`."""
    places = [folder / each for folder in folders for each in (name, Path(name).name)]
    path = next((each for each in places if each.is_file()), None)
    root = None if path is None else compose_file(path)
    if path is None or root is None:
        return
    for key, roles in root.value:
        if key.value == "megatron" and isinstance(roles, yaml.SequenceNode):
            reading.configs.append(Path(name).stem)
            for entry in roles.value:
                yield from _role(entry, str(path))


def _role(entry: yaml.Node, file: str) -> Iterator[Argument]:
    """The overrides of one role, each with its line."""
    parts = {key.value: value for key, value in entry.value} if isinstance(entry, yaml.MappingNode) else {}
    role, overrides = parts.get("role"), parts.get("overrides")
    name = "actor" if role is None else str(role.value)
    for key, value in overrides.value if isinstance(overrides, yaml.MappingNode) else ():
        source = Source(file=file, line=key.start_mark.line + 1)
        is_plain = isinstance(value, yaml.ScalarNode)
        shown = value.value if is_plain else json.dumps(yaml.SafeLoader("").construct_object(value, deep=True))
        own = f"--{key.value.replace('_', '-')}" if name == "actor" else f"{name}.{key.value}"
        # A flag of the command has no value.
        values = () if shown == "true" else ((literal(shown, source),),)
        yield Argument(name=own, values=values, source=source, index=0)


def _defaults(root: yaml.MappingNode) -> Iterator[tuple[str, int]]:
    """The names in Hydra's defaults list, each with its line; `- group: option` is `group/option`."""
    for key, value in root.value:
        if key.value != "defaults" or not isinstance(value, yaml.SequenceNode):
            continue
        for entry in value.value:
            line = entry.start_mark.line + 1
            if isinstance(entry, yaml.ScalarNode):
                yield str(entry.value), line
            elif isinstance(entry, yaml.MappingNode):
                for group, option in entry.value:
                    if isinstance(option, yaml.ScalarNode) and group.value.partition(" ")[0] != "override":
                        yield f"{group.value.partition('@')[0]}/{option.value}", line
