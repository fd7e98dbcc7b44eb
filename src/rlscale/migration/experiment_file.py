"""Writes a translation as an experiment file: options first, then keys by group."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS
from rlscale.config.keys import keys
from rlscale.migration.model_option import option_values
from rlscale.migration.settings import Setting, scalar
from rlscale.migration.translation_draft import TranslationDraft

WIDTH = 116
NEEDS_GPUS = {"cluster.device": "cuda"}
"""A value that options may add: the other projects run on GPUs only."""


def choose_options(draft: TranslationDraft) -> None:
    """Replaces keys by options that say the same, and no more."""
    given = {path: setting.value for path, setting in draft.settings.items() if setting.is_plain}
    if given.get("cluster.colocate") is True and "cluster.rollout_num_gpus" not in draft.settings:
        # Engines on the GPUs of the trainer are as many, which options spell out.
        nodes, gpus = (given.get(f"cluster.actor_num_{name}") for name in ("nodes", "gpus_per_node"))
        if isinstance(gpus, int) and isinstance(nodes or 1, int):
            given["cluster.rollout_num_gpus"] = (nodes or 1) * gpus
    # A key that depends on a variable has no fixed value, so no option can say the same.
    variable = {path for path, setting in draft.settings.items() if not setting.is_plain}
    for group, names in ConfigFolders.find().groups().items():
        if group in GLOBAL_GROUPS or group in draft.options:
            continue
        best: tuple[int, str] | None = None
        for name in names:
            values = option_values(group, name)
            covered = [path for path in values if path in given]
            if covered and variable.isdisjoint(values) and all(_says(path, values[path], given) for path in values):
                best = max(best or (0, ""), (len(covered), name))
        if best is not None:
            draft.options[group] = best[1]


def _says(path: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether the draft, or a default, has a value too."""
    if path in given:
        return bool(given[path] == value)
    return NEEDS_GPUS.get(path) == value or bool(path in keys() and keys()[path].default == value)


def write_experiment(draft: TranslationDraft, heading: str) -> str:
    """The text of the file."""
    lines = ["# @package _global_", *(f"# {line}" for line in textwrap.wrap(heading, WIDTH - 2))]
    if draft.options:
        lines.append("defaults:")
        # YAML reads an option `on` as true unless it is quoted.
        lines += [f"  - override /{group}: {scalar(name)}" for group, name in draft.options.items()]
    covered: dict[str, Any] = {}
    for group, name in draft.options.items():
        covered |= option_values(group, name)
    nested: dict[str, Any] = {}
    order = {path: number for number, path in enumerate(keys())}
    groups = {path.partition(".")[0]: number for number, path in reversed(list(enumerate(keys())))}
    # Keys in the order of the reference pages; arguments of libraries follow those of their group.
    for path in sorted(draft.settings, key=lambda each: (groups.get(each.partition(".")[0], 0), order.get(each, 9999))):
        setting = draft.settings[path]
        if path in covered and covered[path] == setting.value and setting.is_plain:
            continue
        parent = nested
        *parents, name = path.split(".")
        for part in parents:
            parent = parent.setdefault(part, {})
        parent[name] = setting
    lines += _lines(nested, 0)
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], depth: int) -> list[str]:
    lines: list[str] = []
    indent = "  " * depth
    for name, value in values.items():
        if isinstance(value, Setting):
            lines += [f"{indent}# {line}" for line in textwrap.wrap(value.comment, WIDTH - len(indent) - 2)]
            lines += _entry(indent, name, value)
        else:
            lines += [f"{indent}{name}:", *_lines(value, depth + 1)]
    return lines


def _entry(indent: str, name: str, setting: Setting) -> list[str]:
    """A key with its value: a list that is too long for a line has a line for each entry."""
    line = f"{indent}{name}: {setting.yaml()}"
    if len(line) > WIDTH and isinstance(setting.value, list) and not setting.text:
        return [f"{indent}{name}:", *(f"{indent}  - {scalar(entry)}" for entry in setting.value)]
    return [line]
