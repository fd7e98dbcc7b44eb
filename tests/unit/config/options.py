"""Options of the packaged folder and the values that they set, for tests."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from rlscale.config.hydra.compose import compose
from rlscale.config.hydra.config_folders import ConfigFolders, packaged_folder
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.keys import keys

FOLDERS = ConfigFolders.find()
GROUPS = FOLDERS.groups()
EXPERIMENTS = GROUPS["experiment"]
OPTIONS = [(group, name) for group, names in GROUPS.items() if group not in ("experiment", "on") for name in names]


@cache
def composed(*overrides: str) -> dict[str, Any]:
    """The composed values before any rule. Read-only."""
    line = parse_command_line(overrides, GROUPS)
    assert line.problems == []
    return compose(line.overrides, command_line_keys=line.keys, folders=FOLDERS).values


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in keys():
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@cache
def body(group: str, name: str) -> dict[str, Any]:
    """Values that the file of an option sets, by path. Read-only."""
    text: Any = OmegaConf.to_container(OmegaConf.load(packaged_folder() / group / f"{name}.yaml"))
    shared = {} if group in ("experiment", "on") else inherited(group, text)
    text.pop("defaults", None)
    return shared | dict(leaves(text if group in ("experiment", "on") else {group: text}))


def inherited(group: str, text: dict[str, Any]) -> dict[str, Any]:
    """Values that an option inherits from the options in its defaults list."""
    parents = [name for name in text.get("defaults", []) if name != "_self_"]
    return {path: value for name in parents for path, value in body(group, name).items()}


def selections() -> list[dict[str, str]]:
    """Selections of one option in every group; together they contain every option."""
    # Options of different groups set different keys (tested below), so one selection tests all of its options.
    number = max(len(GROUPS[group]) for group, _ in OPTIONS)
    return [{group: GROUPS[group][i % len(GROUPS[group])] for group, _ in OPTIONS} for i in range(number)]


def assert_wins(chosen: dict[str, str], *overrides: str) -> None:
    found = dict(leaves(composed(*(f"{group}={option}" for group, option in chosen.items()), *overrides)))
    for group, option in chosen.items():
        for path, value in body(group, option).items():
            assert found[path] == value, (path, option)
