"""Configurations of verl and TRL as YAML or JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from rlscale.config.yaml_aliases import compose_yaml
from rlscale.errors import ConfigError, Problem
from rlscale.migration.argument_tables import read_table
from rlscale.migration.foreign_arguments import Argument, Project, Reading
from rlscale.migration.shell_values import Piece, Source, Text, literal

SUFFIXES = (".yaml", ".yml", ".json")
_HYDRA_ONLY = ("hydra", "defaults", "_target_")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:, *([^{}]*))?\}")


def read_config_file(path: Path, *, given: Mapping[str, str], name: str) -> Reading | None:
    """The run that a file describes. None: it is of no known project.

    Raises ConfigError when it is no YAML or JSON.
    """
    root = compose_file(path)
    if root is None:
        return None
    top = {str(key.value) for key, _ in root.value}
    project = _project(top)
    if project is None:
        return None
    reading = Reading(project=project, name=name, launched_at=Source(file=str(path), line=1))
    reading.arguments = file_arguments(root, path, project, given)
    if project is Project.verl:
        is_supervised = "actor_rollout_ref" not in top
        reading.launcher = "verl.trainer.sft_trainer" if is_supervised else "verl.trainer.main_ppo"
    return reading


def compose_file(path: Path) -> yaml.MappingNode | None:
    """The mapping of a YAML or JSON file, with the lines of its keys. None: it is no mapping.

    Raises ConfigError when it is no YAML or JSON.
    """
    try:
        root = compose_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(path="input", rule="be readable", value=str(path), fix=str(error))
        raise ConfigError([problem]) from error
    except RecursionError as error:
        fix = "it has too many brackets"
        raise ConfigError([Problem(path="input", rule="be valid YAML or JSON", value=str(path), fix=fix)]) from error
    except yaml.YAMLError as error:
        problem = Problem(path="input", rule="be valid YAML or JSON", value=str(path), fix=" ".join(str(error).split()))
        raise ConfigError([problem]) from error
    if not isinstance(root, yaml.MappingNode):
        return None
    try:
        yaml.SafeLoader("").construct_object(root, deep=True)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        fix = " ".join(str(error).split())
        raise ConfigError([Problem(path="input", rule="have plain values only", value=str(path), fix=fix)]) from error
    return root


def file_arguments(root: yaml.MappingNode, path: Path, project: Project, given: Mapping[str, str]) -> list[Argument]:
    """The values of a file as arguments. TRL's files are flat; a mapping there is the value of an argument."""
    flat = list(_flatten(root, "", str(path), is_flat=project is Project.trl))
    values = {key: text for key, (text, _) in flat}
    return [
        Argument(name=key, values=tuple(_resolve(each, values, given) for each in found), source=source, index=index)
        for index, (key, (found, source)) in enumerate(flat)
    ]


def _project(top: set[str]) -> Project | None:
    if top & {"actor_rollout_ref"} or {"data", "trainer"} <= top:
        return Project.verl
    known = len(top & read_table(Project.trl).keys())
    return Project.trl if known >= max(1, len(top) // 3) else None


Entry = tuple[str, tuple[tuple[Text, ...], Source]]


def _flatten(node: yaml.MappingNode, prefix: str, file: str, *, is_flat: bool) -> Iterator[Entry]:
    """Leaves by path, each with its line."""
    for key, value in node.value:
        if key.value in _HYDRA_ONLY:
            continue
        path, source = f"{prefix}{key.value}", Source(file=file, line=key.start_mark.line + 1)
        if isinstance(value, yaml.MappingNode) and value.value and not is_flat:
            yield from _flatten(value, f"{path}.", file, is_flat=False)
        else:
            yield path, (_texts(value, source, is_flat=is_flat), source)


def _texts(node: yaml.Node, source: Source, *, is_flat: bool) -> tuple[Text, ...]:
    if isinstance(node, yaml.ScalarNode):
        # A null value is written like the word.
        shown = "null" if node.tag.endswith(":null") else str(node.value)
        return ((Piece(value=shown, template=shown, source=source),),)
    if isinstance(node, yaml.SequenceNode) and is_flat:
        return tuple(text for each in node.value for text in _texts(each, source, is_flat=True))
    loaded = yaml.SafeLoader("")
    shown = json.dumps(loaded.construct_object(node, deep=True), default=str)
    return ((literal(shown, source),),)


def _resolve(text: Text, values: Mapping[str, tuple[Text, ...]], given: Mapping[str, str]) -> Text:
    """The text with references to other keys of the file replaced by their values."""
    (piece,) = text
    found = _REFERENCE.fullmatch(piece.value)
    if found is None:
        return text
    name = found[1]
    if name in given:
        return (literal(given[name], piece.source),)
    target = values.get(name)
    if target:
        return target[0] if target[0] == text else _resolve(target[0], values, given)
    if found[2] is not None:
        return (literal(found[2].strip("\"' "), piece.source),)
    return (Piece(value="", template=piece.value, source=piece.source, known=False),)
