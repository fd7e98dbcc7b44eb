"""Commands and keys of the hand-written reference and comparison pages exist."""

import re
import shlex
from pathlib import Path

import pytest

from rlscale.config import load_config_with_notes
from rlscale.config.keys import keys
from rlscale.config.rules.algo import ONE_STEP

DOCS = Path(__file__).parents[3] / "docs"
PAPERS = DOCS / "reference" / "papers.md"
TROUBLESHOOTING = DOCS / "how-to" / "troubleshooting.md"
PAGES = [
    PAPERS,
    TROUBLESHOOTING,
    DOCS / "reference" / "metrics.md",
    DOCS / "faq.md",
    *sorted((DOCS / "compare").glob("*.md")),
]


def commands(page: Path) -> list[str]:
    return re.findall(r"`rlscale-train ([^`]+)`", page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("command", dict.fromkeys(commands(PAPERS)))
def test_the_configuration_of_a_paper_composes_without_a_warning(command: str) -> None:
    loaded = load_config_with_notes(shlex.split(command), to_run=False)
    # Two of slime's published recipes set a clip range and take one step.
    assert [line for line in loaded.warnings if not line.endswith(ONE_STEP)] == []
    assert not loaded.warnings or (command.startswith("experiment=") and " " not in command)


def test_the_index_has_twenty_papers_with_distinct_numbers() -> None:
    rows = [line for line in PAPERS.read_text().splitlines() if "arxiv.org/abs/" in line]
    numbers = [re.findall(r"\[(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/(\d{4}\.\d{5})\)", row) for row in rows]
    assert all(len(found) == 1 and found[0][0] == found[0][1] for found in numbers)
    assert len({found[0][0] for found in numbers}) == len(rows) >= 20
    assert all("`rlscale-train " in row for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_of_a_page_exists(page: Path) -> None:
    groups = {path.partition(".")[0] for path in keys() if "." in path}
    # Words in code style such as `algo.eps_clip=0.2`; files and modules have another start or end.
    words = re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", page.read_text())
    named = {word for word in words if word.partition(".")[0] in groups}
    assert sorted(word for word in named if word not in keys() and not word.startswith(("sglang.", "megatron."))) == []


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    code = "\n".join(path.read_text() for path in sorted((DOCS.parent / "src" / "rlscale").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # literals that span lines
    section = TROUBLESHOOTING.read_text().partition("## During the run")[2].partition("## Memory")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) > 20
    for message in messages:
        # What stands between numbers and names; a value follows `=`.
        parts = [part.strip(" :;,.") for part in re.split(r"\.\.\.|=", message)]
        assert max(map(len, parts)) >= 12, message
        assert [part for part in parts if len(part) >= 5 and part not in joined] == [], message
