"""The committed reference pages are those of the dataclasses."""

from pathlib import Path

from rlscale.algo.advantages import ESTIMATORS
from rlscale.cli.algorithms import GOLDEN
from rlscale.cli.reference import make_pages, write_pages
from rlscale.config.folder import ConfigFolders
from rlscale.config.rules import RULES
from rlscale.config.schema import keys

FOLDER = Path(__file__).parents[3] / "docs" / "reference"


def test_the_pages_are_current() -> None:
    for name, text in make_pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"run python -m rlscale.cli.reference {FOLDER}"


def test_a_page_has_a_row_per_key(tmp_path: Path) -> None:
    write_pages(tmp_path / "new")
    page = (tmp_path / "new" / "algo.md").read_text(encoding="utf-8")
    assert "| `algo.eps_clip` | a number, > 0 | `0.2` |" in page
    assert "one of k1\\|k2\\|k3\\|low_var_kl" in page
    assert "So far this version takes `grpo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`," in page


def test_the_page_of_algorithms_names_every_estimator_option_and_key() -> None:
    page = make_pages()["algorithms.md"]
    assert all(f"| `{name}`" in page for name in ESTIMATORS)
    assert all(f"| `algo={option}` |" in page for option in ConfigFolders.find().groups()["algo"])
    unnamed = [path for path in keys() if path.startswith("algo.") and f"`{path}`" not in page]
    assert unnamed == ["algo.use_routing_replay"]


def test_the_page_of_rules_names_every_rule_and_what_it_reads() -> None:
    page = make_pages()["rules.md"]
    for rule in RULES:
        (row,) = [
            line for line in page.splitlines() if line.startswith(f"| {rule.name.replace('_', ' ').capitalize()}. ")
        ]
        assert all(f"`{path}`" in row for path in rule.reads)


def test_the_tests_that_the_page_names_exist() -> None:
    assert all((FOLDER.parents[1] / file).is_file() for file in GOLDEN.values())
