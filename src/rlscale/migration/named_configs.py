"""Config files that a command names: `--config-name` and `--config-path` of verl, `--config` of TRL.

Their values come before the arguments of the command, which override them. Files are looked up next to the script, in
the config path and in the current folder; a file that is not there is reported by the translation of its argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from rlscale.migration.config_files import SUFFIXES, compose_file, file_arguments
from rlscale.migration.foreign_arguments import Argument, Project, Reading
from rlscale.migration.shell_values import Source

OWN_CONFIG = re.compile(r"(?:ppo|ppo_megatron|sft|sft_trainer_engine|dapo|dapo_megatron)_trainer|sft_trainer_engine")
"""Names of verl's own configurations, whose values are its defaults."""

NAME_FLAGS, PATH_FLAGS = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")


def read_named_configs(reading: Reading, script: Path | None, given: Mapping[str, str]) -> None:
    """Puts the values of the files that a command names before its arguments.

    Args:
        script: the input; None: a bare command line.
    """
    flags = NAME_FLAGS if reading.project is Project.verl else ("config",)
    named = next((each for each in reversed(reading.arguments) if each.name in flags and each.value), None)
    if named is None or reading.project is Project.slime or Path(named.value).stem in reading.configs:
        return
    folders = list(_folders(reading, script))
    found = list(_read(named.value, folders, named.source, reading, given))
    whole = [*found, *reading.arguments]
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
