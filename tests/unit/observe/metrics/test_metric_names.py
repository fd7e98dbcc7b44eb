"""Documentation of the metrics: every phase has a duration, and the guide lists every name."""

from pathlib import Path

from rlscale.observe.metrics.metric_names import METRICS, PHASES


def test_every_phase_has_a_documented_duration() -> None:
    assert {f"time/{phase}_s" for phase in PHASES} <= METRICS.keys()


def test_the_guide_lists_every_metric() -> None:
    rows = (f"| `{name}` | {meaning} |" for name, meaning in METRICS.items())
    guide = (Path(__file__).parents[4] / "docs" / "how-to" / "run-folder.md").read_text()
    assert "| name | meaning |\n|---|---|\n" + "\n".join(rows) + "\n\n" in guide
