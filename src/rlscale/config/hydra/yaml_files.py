"""Reads the YAML files of a command line without Hydra and reports all problems, each with its line.

Hydra stops at the first file that it cannot use. This module reads the same files in the same order, by the rules of
the files in `conf/`, and continues after a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders, short_path
from rlscale.config.hydra.internals import YamlLoader
from rlscale.config.keys import nodes
from rlscale.config.problems import nearest, show
from rlscale.config.yaml_aliases import AliasError, compose_yaml
from rlscale.errors import Problem

GLOBAL = "# @package _global_"
NULL = "tag:yaml.org,2002:null"
GLOBAL_GROUPS = ("experiment", "on")
"""Groups whose files set keys of every other group."""


@dataclass(kw_only=True, slots=True)
class YamlFile:
    """The file of one option: the values it sets and their lines, by full path."""

    group: str  # empty for config.yaml
    path: Path
    values: dict[str, tuple[Any, int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class YamlFiles:
    """Files in the order of merging, and their problems."""

    folders: ConfigFolders
    files: list[YamlFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    selected: dict[str, str | None] = field(default_factory=dict)  # option by group; the last choice wins

    def values(self) -> dict[str, Any]:
        """The values that the files set, nested."""
        nested: dict[str, Any] = {}
        for file in self.files:
            for path, (value, _) in file.values.items():
                if not path.startswith("hydra."):
                    set_nested(nested, path, value)
        return nested

    def origin(self, path: str) -> str:
        """File and line that set a key last; empty when none does."""
        found = ""
        for file in self.files:
            for name, (_, line) in file.values.items():
                if path == name or path.startswith(f"{name}."):
                    found = f"{short_path(file.path)}:{line}"
        return found

    def values_of(self, path: str) -> list[tuple[Any, Path, int]]:
        """The values that the files give to a key, each with its file and line."""
        return [
            (value, file.path, line)
            for file in self.files
            for name, (value, line) in file.values.items()
            if name == path
        ]


def read_yaml_files(choices: Sequence[tuple[str, str]], folders: ConfigFolders) -> YamlFiles:
    """Reads the files of the options that a command line selects.

    Args:
        choices: group and option, in the order of the command line.
        folders: the folders of the options.
    """
    found = YamlFiles(folders=folders)
    own = [(group, option) for group, option in choices if group not in GLOBAL_GROUPS]
    # Hydra merges experiments and overlays last, but their defaults lists select options: read them first.
    overlays: list[YamlFile] = []
    # In the order in which Hydra merges them: experiments before overlays.
    for group in GLOBAL_GROUPS:
        for name, option in choices:
            if name == group:
                _visit(found, group, option, overlays)
    found.selected |= dict(own)
    _read(found, YamlFile(group="", path=folders.main / f"{PRIMARY}.yaml"))
    for group, choice in list(found.selected.items()):
        if choice is not None:
            _visit(found, group, choice, found.files)
    found.files += overlays
    return found


def set_nested(nested: dict[str, Any], path: str, value: Any) -> None:
    """Sets a value in nested mappings; replaces a plain value on the way to it by a mapping."""
    *parents, name = path.split(".")
    for parent in parents:
        inner = nested.get(parent)
        if not isinstance(inner, dict):
            inner = nested[parent] = {}
        nested = inner
    nested[name] = value


def _visit(
    found: YamlFiles, group: str, option: str, files: list[YamlFile], *, above: tuple[tuple[str, str], ...] = ()
) -> None:
    """Reads an option and the options it includes, and appends them to `files` in the order of merging."""
    path = found.folders.find_file(f"{group}/{option}")
    if path is None:
        return  # reported already, for the override or file that selects it
    file, ancestors = YamlFile(group=group, path=path), (*above, (group, option))
    entries = _read(found, file)
    for parent in [entry for entry in entries if isinstance(entry, _Parent)]:
        if (parent.group, parent.option) not in ancestors:
            _visit(found, parent.group, parent.option, files, above=ancestors)
        else:
            rule, fix = "not form a cycle", "remove this entry"
            _FileProblems(found, file).add(parent.line, rule, parent.option, fix, path="defaults")
    # After its parents, so that it overrides them.
    files.append(file)
    found.selected |= {entry.group: entry.option for entry in entries if isinstance(entry, _Choice)}


@dataclass(frozen=True, slots=True)
class _Choice:
    """`override /group: option`."""

    group: str
    option: str | None


@dataclass(frozen=True, slots=True)
class _Parent:
    """`- option`: another file of the same group that this one includes."""

    group: str
    option: str
    line: int


def _syntax_fix(error: yaml.MarkedYAMLError) -> str:
    """The advice for a text that is no YAML."""
    if error.context == "expected a single document in the stream":
        return "keep one document: remove the line ---"
    if "expected <block end>" in str(error.problem):
        return "begin the keys of one group in the same column"
    if "undefined alias" in str(error.problem):
        return "write a value that begins with * in quotes"
    return "close every bracket and quote; use no tabs"


def _read(found: YamlFiles, file: YamlFile) -> list[_Choice | _Parent]:
    """Reads the values of `file`; returns the entries of its defaults list."""
    problems = _FileProblems(found, file)
    report = problems.add
    try:
        text = file.path.read_text(encoding="utf-8")
        root = compose_yaml(text, YamlLoader)
    except yaml.MarkedYAMLError as error:
        # YAML counts lines from 0.
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        report(line, "be valid YAML", f'"{error.problem}"', _syntax_fix(error))
        return []
    except RecursionError:
        report(1, "be nested less deeply", "too many brackets", "close every bracket")
        return []
    except AliasError as error:
        report(1, "expand to fewer values", "too many", str(error))
        return []
    except (OSError, ValueError, yaml.YAMLError) as error:
        report(1, "be a text file that contains YAML", f'"{str(error).splitlines()[0]}"', "save it as text in UTF-8")
        return []
    if text.startswith("\ufeff"):
        # Hydra does not find the package in a first line that begins with this mark.
        report(1, "have no byte order mark", '"\\ufeff"', "save it as UTF-8 without BOM")
        return []
    if not isinstance(root, yaml.MappingNode):
        found_text = "nothing" if root is None else f'"{text.splitlines()[0]}"'
        report(1, "set keys, each as `name: value`", found_text, "the files in conf/ are examples")
        return []
    if file.group in GLOBAL_GROUPS and GLOBAL not in text.splitlines():
        fix = f"files in {file.group}/ set keys of every group"
        report(1, f'have a line "{GLOBAL}"', f'"{text.splitlines()[0]}"', fix)
    try:
        repeated = list(_repeated_keys(root))
    except RecursionError:
        report(1, "contain plain values only", "a mapping with an alias of itself", "remove the alias")
        return []
    for name, line in repeated:
        report(line, "set each key once", name, "keep one of the lines")
    if not repeated and (wrong := _unreadable_value(root)):
        report(*wrong, "write strings, numbers, lists and mappings")
    prefix = f"{file.group}." if file.group and file.group not in GLOBAL_GROUPS else ""
    for path, line in _dotted_keys(root, prefix):
        parent, _, name = path.rpartition(".")
        fix = f"write `{name}: ...`, indented, below `{parent.rpartition('.')[2]}:`"
        report(line, "be nested in a file, where a dotted name has no meaning", f'"{path}"', fix, path=path)
    for path, line in _unnamed_values(root, prefix):
        report(line, "give each of its values a name that is a text", "null", "replace null by a name", path=path)
    file.values = dict(_leaves(root, prefix))
    defaults = next((child for key, child in root.value if key.value == "defaults"), None)
    return list(_entries(defaults, problems)) if defaults is not None and file.group else []


class _FileProblems:
    """Records the problems of one file."""

    def __init__(self, found: YamlFiles, file: YamlFile) -> None:
        self.groups = found.folders.groups()
        self.group = file.group
        self._problems, self._name = found.problems, short_path(file.path)

    def add(self, line: int, rule: str, value: str, fix: str = "", *, path: str = "") -> None:
        origin = f"{self._name}:{line}"
        self._problems.append(Problem(path=path or self._name, rule=rule, value=value, fix=fix, origin=origin))


def _repeated_keys(node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Keys that a mapping sets twice, with the line of the second."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, child in node.value:
        if str(key.value) in seen:
            yield str(key.value), key.start_mark.line + 1
        seen.add(str(key.value))
        yield from _repeated_keys(child)


def _unreadable_value(root: yaml.Node) -> tuple[int, str, str] | None:
    """Line, rule and message for a value that the loader cannot construct; None when it can construct all."""
    try:
        YamlLoader("").construct_object(root, deep=True)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return line, "contain plain values only", f'"{error.problem}"'
    except ValueError as error:  # a number of thousands of digits, or a tag that the text does not fit
        return root.start_mark.line + 1, "contain plain values only", f'"{error}"'
    return None


def _dotted_keys(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    """Keys of groups that contain a dot, with their line."""
    for key, child in node.value:
        path = f"{prefix}{key.value}"
        if "." in str(key.value) and path.partition(".")[0] in nodes():
            yield path, key.start_mark.line + 1
        elif path in nodes() and isinstance(child, yaml.MappingNode):
            yield from _dotted_keys(child, f"{path}.")


def _unnamed_values(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    """Mappings with the key null, which OmegaConf refuses, each with its line; the path of the file's own is empty."""
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    for key, child in pairs:
        if key.tag == NULL:
            yield prefix.removesuffix("."), key.start_mark.line + 1
        yield from _unnamed_values(child, f"{prefix}{key.value}.")
    for child in children:
        yield from _unnamed_values(child, prefix)


def _leaves(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, tuple[Any, int]]]:
    for key, child in node.value:
        if not isinstance(key, yaml.ScalarNode) or any(_unnamed_values(child, "")) or key.tag == NULL:
            continue  # reported as a name that is no text
        path = f"{prefix}{key.value}"
        # Settings of Hydra are nested too, but are not part of the config.
        is_node = path in nodes() or path.partition(".")[0] == "hydra"
        if is_node and isinstance(child, yaml.MappingNode):
            yield from _leaves(child, f"{path}.")
        elif key.value != "defaults":
            yield path, (value_of(child), key.start_mark.line + 1)


def value_of(node: yaml.Node) -> Any:
    """The value of a node; its text when the loader cannot construct it, which `_unreadable_value` reports."""
    loader = YamlLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError):
        return str(node.value)


def _entries(defaults: yaml.Node, problems: _FileProblems) -> Iterator[_Choice | _Parent]:
    """The valid entries of a defaults list."""
    line = defaults.start_mark.line + 1
    if not isinstance(defaults, yaml.SequenceNode):
        problems.add(
            line, "be a list", show(value_of(defaults)), "write `- override /<group>: <option>`", path="defaults"
        )
        return
    # Hydra requires entries with override at the end of the list.
    is_late = False
    for item in defaults.value:
        line, value = item.start_mark.line + 1, value_of(item)
        if isinstance(value, str):
            if is_late and value != "_self_":
                rule = "list other files above the entries with override"
                problems.add(line, rule, value, "move it above them", path="defaults")
            yield from _parent(value, line, problems)
        elif isinstance(value, Mapping) and len(value) == 1:
            ((name, option),) = value.items()
            is_late = True
            yield from _choice(str(name), option, line, problems)
        else:
            fix = "write `- override /<group>: <option>`"
            problems.add(line, "have one `group: option` pair per entry", show(value), fix, path="defaults")


def _parent(name: str, line: int, problems: _FileProblems) -> Iterator[_Parent]:
    """`- option` of the same group, or `- /group/option`."""
    if name == "_self_":
        return
    # `/algo/gspo` names group and option, `gspo` an option of the same group.
    group, _, option = name.removeprefix("/").rpartition("/") if name.startswith("/") else (problems.group, "", name)
    if option in problems.groups.get(group, ()):
        yield _Parent(group, option, line)
    else:
        _report_option(problems, group, option, line)


def _choice(name: str, option: Any, line: int, problems: _FileProblems) -> Iterator[_Choice]:
    """`override /group: option`."""
    parts = name.split()
    group = parts[-1].removeprefix("/").partition("@")[0]
    if group not in problems.groups:
        found = nearest(group, problems.groups)
        fix = f"did you mean {found}?" if found else f"groups: {', '.join(problems.groups)}"
        problems.add(line, "be a known group", show(option), fix, path=group)
    elif parts[:-1] != ["override"] or not parts[-1].startswith("/"):
        fix = f"write `override /{group}: {option}`"
        problems.add(line, "be selected with override and a slash", f'"{name}: {option}"', fix, path=group)
    elif group in GLOBAL_GROUPS:
        fix = "choose it on the command line" if group != problems.group else f"list it without override: `- {option}`"
        problems.add(line, "not be overridden in a file", show(option), fix, path=group)
    elif option is None:
        yield _Choice(group, None)
    else:
        # A list selects several options; each one is checked.
        wrong = [one for one in (option if isinstance(option, list) else [option]) if one not in problems.groups[group]]
        for each in wrong:
            _report_option(problems, group, each, line)
        if not wrong and isinstance(option, str):
            yield _Choice(group, option)


def _report_option(problems: _FileProblems, group: str, option: Any, line: int) -> None:
    options = problems.groups.get(group, [])
    found = nearest(str(option), options)
    if option is True and "on" in options:
        # YAML reads the word as a boolean, and so does Hydra.
        fix = f'write "on" in quotes; options: {", ".join(options)}'
    else:
        fix = (f"did you mean {found}? " if found else "") + f"options: {', '.join(options)}"
    problems.add(line, "be one of its options", show(option), fix, path=group)
