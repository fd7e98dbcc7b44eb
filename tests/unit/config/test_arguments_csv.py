"""The keys that are built against the table of arguments: same default, same type, at least its choices."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlscale.config.schema import keys

TABLE = Path(__file__).parents[2] / "data" / "arguments.csv"
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list[str]": list[str], "list[int]": list[int]}


def rows() -> Iterator[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        yield from (row for row in csv.DictReader(file) if row["key"] in keys() and not row["experiment"])


ROWS = list(rows())


def test_the_table_covers_most_keys() -> None:
    assert len({row["key"] for row in ROWS}) > 70


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['key']}:{row['argument']}")
def test_default_and_choices(row: dict[str, str]) -> None:
    key = keys()[row["key"]]
    assert key.required == (row["default"] == "required")
    if not key.required:
        default: Any = json.loads(row["default"])
        assert key.default == default and isinstance(key.default, bool) == isinstance(default, bool)
        assert key.optional == (default is None)
    if row["choices"] and key.choices:
        assert set(row["choices"].split("|")) <= set(key.choices)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['key']}:{row['argument']}")
def test_type(row: dict[str, str]) -> None:
    key = keys()[row["key"]]
    kind = row["type"].split(" ")[0].split("(")[0]
    if kind == "json":
        assert key.is_mapping
    elif kind == "flag":
        assert key.type is bool
    else:
        assert key.type == TYPES[kind] or (kind == "str" and key.choices)
