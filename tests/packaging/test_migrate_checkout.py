"""The script that translates a checkout, over the kept launch scripts: the shares of its table do not fall."""

import re
from pathlib import Path

import pytest

from scripts.migrate_checkout import main

THIRD_PARTY = Path(__file__).parents[1] / "data" / "third_party"

# Scripts that start a run; of them translated without a loss, that load, and that can be planned: at least these;
# and with a refused key: at most these. Raise the numbers when a translation gets better.
EXPECTED = {
    "slime": {"inputs": 21, "complete": 16, "loads": 16, "plans": 16, "refused": 2},
    "verl": {"inputs": 8, "complete": 4, "loads": 6, "plans": 5, "refused": 0},
    "trl": {"inputs": 3, "complete": 0, "loads": 3, "plans": 3, "refused": 0},
}


def rows(table: str) -> dict[str, dict[str, int]]:
    """The numbers of the printed table, by folder and column."""
    lines = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")]
    (_, *columns), *found = lines
    return {name: dict(zip(columns, map(int, numbers), strict=True)) for name, *numbers in found}


@pytest.mark.nightly
@pytest.mark.parametrize("project", EXPECTED)
def test_the_shares_of_translated_scripts_do_not_fall(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(THIRD_PARTY / project)]) == 0
    found, least = rows(capsys.readouterr().out)[project], EXPECTED[project]
    assert found["inputs"] == least["inputs"] and found["arguments"] > 10 * found["inputs"]
    for column in ("complete", "loads", "plans"):
        assert found[column] >= least[column], f"{column}: {found[column]} of {found['inputs']} scripts"
    assert found["refused"] <= least["refused"]
