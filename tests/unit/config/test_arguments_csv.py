"""Every row of the table of arguments matches a key or a value of a preset."""

from collections.abc import Mapping

import pytest

from rlscale.config.keys import keys
from tests.unit.config.arguments import differences, progress, rows

NUM_ROWS = 265


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['key']}:{row['argument']}:{row['experiment']}")
def test_a_row_is_a_key_or_a_value_of_a_preset(row: Mapping[str, str]) -> None:
    assert differences(row) == []


def test_the_report_counts_every_row_once_and_lists_what_is_missing() -> None:
    found = progress()
    assert sum(found.counts.values()) == len(rows()) == NUM_ROWS
    assert found.counts["missing"] == 0, found.missing
    assert found.lines()[0].startswith(f"arguments.csv: {NUM_ROWS} arguments: {found.counts['built']} built")


WRONG = {
    "key": "optim.lrr",
    "type": "float",
    "default": "null",
    "choices": "",
    "experiment": "",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "there is no such key"),
        ({"key": "optim.lr", "type": "int"}, "its type must be int, got a number or null"),
        ({"key": "optim.lr", "default": "0.1"}, "its default must be 0.1, got None"),
        ({"key": "optim.name", "type": "str", "default": '"adam"', "choices": "adam|sgd"}, "its choices must have sgd"),
        ({"key": "optim.lr", "experiment": "nosuch", "default": "1.0"}, "there is no experiment=nosuch"),
        (
            {"key": "optim.lr", "experiment": "quickstart", "default": "9.0"},
            "experiment=quickstart must have 9.0, got 0.0005",
        ),
    ],
)
def test_a_difference_is_found(change: Mapping[str, str], message: str) -> None:
    (found,) = differences(WRONG | change)
    assert found.startswith(message.partition(", got 0")[0])


def test_required_keys_are_those_of_the_table() -> None:
    named = {row["key"] for row in rows() if row["default"] == "required"}
    assert named == {key.path for key in keys().values() if key.required}
