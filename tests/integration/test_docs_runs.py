"""Lines of `rlscale-train` in the docs, run with what makes them short: each trains, and writes its metrics."""

import re
from pathlib import Path

import pytest

from tests.docs_lines import RUNS, lines, overrides_of
from tests.integration.conftest import Command
from tests.test_docs import TUTORIAL, blocks


def write_modules(page: Path, folder: Path) -> None:
    """Writes the modules of a page: blocks whose first line is a comment with their name."""
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)", block):
            (folder / name[1]).write_text(block, encoding="utf-8")
    if page.name == "rewards.md":
        (folder / "my_reward.py").write_text(blocks(page, "python")[1], encoding="utf-8")
    elif page == TUTORIAL:
        (folder / "my_reward.py").write_text(blocks(page, "python")[0], encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("line", "page"),
    [pytest.param(*pair, id=pair[0]) for pair in lines().items() if any(re.fullmatch(each, pair[0]) for each in RUNS)],
)
def test_a_line_of_the_docs_runs(line: str, page: Path, command: Command) -> None:
    write_modules(page, command.folder)
    # The folder of the run is that of the test, whatever the line says.
    words = [word for word in overrides_of(line, command.folder) if not word.startswith("run.dir=")]
    done = command.run(*words, small=False, timeout_s=580)
    assert done.code == 0, f"{line}\n{done.err}"
    records = command.metrics()
    # Scripted answers train nothing.
    key = "reward/mean" if "debug.rollout_only=true" in words else "train/loss"
    assert records and any(key in record for record in records), records
