"""The table of arguments compared with the keys: built, or missing."""

import csv
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rlscale.config.hydra.compose import compose
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.keys import Key, keys

TABLE = Path(__file__).parents[2] / "data" / "arguments.csv"
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list[str]": list[str], "list[int]": list[int]}


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def differences(row: Mapping[str, str]) -> list[str]:
    """Differences between a row of the table and its key, or its value in a preset; empty when they agree."""
    key = keys().get(row["key"])
    if key is None:
        return ["there is no such key"]
    if row["experiment"]:
        return _preset_differences(row)
    return [*_type_differences(row, key), *_default_differences(row, key), *_choice_differences(row, key)]


def _type_differences(row: Mapping[str, str], key: Key) -> list[str]:
    kind = row["type"].split(" ")[0].split("(")[0]
    if kind == "json":
        right = key.is_mapping
    elif kind == "flag":
        right = key.type is bool
    else:
        right = key.type == TYPES[kind] or (kind == "str" and bool(key.choices))
    return [] if right else [f"its type must be {row['type']}, got {key.type_text}"]


def _default_differences(row: Mapping[str, str], key: Key) -> list[str]:
    if key.required or row["default"] == "required":
        same = key.required and row["default"] == "required"
    else:
        default: Any = json.loads(row["default"])
        same = key.default == default and isinstance(key.default, bool) == isinstance(default, bool)
        same = same and key.optional == (default is None)
    return [] if same else [f"its default must be {row['default']}, got {key.default!r}"]


def _choice_differences(row: Mapping[str, str], key: Key) -> list[str]:
    lacking = set(row["choices"].split("|") if row["choices"] else ()) - set(key.choices)
    return [f"its choices must have {name}" for name in sorted(lacking)]


def _preset_differences(row: Mapping[str, str]) -> list[str]:
    if row["experiment"] not in ConfigFolders.find().groups()["experiment"]:
        return [f"there is no experiment={row['experiment']}"]
    node: Any = _preset(row["experiment"])
    for name in row["key"].split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    value = keys()[row["key"]].default if node is None else node
    wanted = json.loads(row["default"])
    return [] if value == wanted else [f"experiment={row['experiment']} must have {wanted}, got {value}"]


@cache
def _preset(name: str) -> Mapping[str, Any]:
    folders = ConfigFolders.find()
    line = parse_command_line([f"experiment={name}"], folders.groups())
    return compose(line.overrides, command_line_keys=line.keys, folders=folders).values


@dataclass(kw_only=True)
class Progress:
    """Numbers of rows of the table, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report at the end of the tests."""
        total = sum(self.counts.values())
        kinds = ", ".join(f"{self.counts[kind]} {kind}" for kind in ("built", "missing"))
        found = [f"arguments.csv: {total} arguments: {kinds}"]
        return found + [f"arguments.csv: missing: {text}" for text in self.missing]


def progress() -> Progress:
    """The whole table."""
    found = Progress()
    for row in rows():
        wrong = differences(row)
        found.counts["missing" if wrong else "built"] += 1
        found.missing += [f"{row['key']}: {text}" for text in wrong]
    return found
