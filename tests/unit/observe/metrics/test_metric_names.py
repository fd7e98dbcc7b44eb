"""Documentation of the metrics: every phase has a duration, and the reference lists every name with a range."""

from html import unescape
from pathlib import Path

from rlscale.observe.metrics.metric_names import METRICS, PHASES
from scripts.docs.metrics import SECTIONS

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"


def test_every_phase_has_a_documented_duration() -> None:
    assert {f"time/{phase}_s" for phase in PHASES} <= METRICS.keys()


def test_the_reference_lists_every_metric_with_meaning_and_range() -> None:
    # A bar within a cell is escaped, and a bracket outside of code.
    text = unescape(PAGE.read_text().replace("\\|", "/"))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [len(row) for row in rows] == [3] * len(METRICS)
    assert {row[0].strip("`"): row[1] for row in rows} == {
        name: meaning.replace("|", "/") for name, meaning in METRICS.items()
    }
    assert all(row[2].strip() for row in rows)


def test_every_range_belongs_to_a_metric_of_its_section() -> None:
    for section in SECTIONS:
        assert section.ranges.keys() <= METRICS.keys(), section.title
        assert all(name.startswith(section.prefixes) for name in section.ranges), section.title
