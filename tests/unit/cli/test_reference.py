"""The committed reference pages are those of the dataclasses."""

from pathlib import Path

from rlscale.cli.reference import make_pages, write_pages

FOLDER = Path(__file__).parents[3] / "docs" / "reference"


def test_the_pages_are_current() -> None:
    for name, text in make_pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"run python -m rlscale.cli.reference {FOLDER}"


def test_a_page_has_a_row_per_key(tmp_path: Path) -> None:
    write_pages(tmp_path / "new")
    page = (tmp_path / "new" / "algo.md").read_text(encoding="utf-8")
    assert "| `algo.eps_clip` | a number, > 0 | `0.2` |" in page
    assert "one of k1\\|k2\\|k3\\|low_var_kl" in page
    assert "So far this version runs `grpo`, `gspo`, `cispo` only." in page
