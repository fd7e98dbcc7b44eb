"""The committed reference pages match the dataclasses."""

import re
from pathlib import Path

import pytest

from rlscale.algo.advantages import ESTIMATORS
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.keys import keys
from rlscale.config.rules import RULES
from scripts.docs import llms, migration_pages, reference
from scripts.docs.algorithms import ADDITIONS, GOLDEN, make_page, read_options
from scripts.docs.reference import make_pages, write_pages
from scripts.docs.rules import keys_read, spell_name

FOLDER = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.slow
def test_the_pages_are_current() -> None:
    for name, text in make_pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"run python -m scripts.docs.reference {FOLDER}"


def test_help_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for script in (reference, llms, migration_pages):
        with pytest.raises(SystemExit) as ended:
            script.main(["--help"])
        assert ended.value.code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_page_has_a_row_per_key(tmp_path: Path) -> None:
    write_pages(tmp_path / "new")
    page = (tmp_path / "new" / "algo.md").read_text(encoding="utf-8")
    assert "| `algo.eps_clip` | a number, > 0 | `0.2` |" in page
    assert "one of k1 \\| k2 \\| k3 \\| low_var_kl" in page


def test_the_page_of_algorithms_names_every_estimator_option_and_key() -> None:
    page = make_page()
    assert all(f"| `{name}`" in page for name in ESTIMATORS)
    assert all(f"| `algo={option}` |" in page for option in ConfigFolders.find().groups()["algo"])
    unnamed = [path for path in keys() if path.startswith("algo.") and f"`{path}`" not in page]
    assert unnamed == ["algo.use_routing_replay", "algo.use_rollout_routing_replay"]


@pytest.mark.slow
def test_the_page_of_rules_names_every_rule_and_what_it_reads() -> None:
    page = make_pages()["rules.md"]
    for rule in RULES:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {spell_name(rule.name)}. ")]
        assert all(f"`{path}`" in row for path in keys_read(rule))
    assert spell_name("deterministic_sglang_excludes_min_p") == "Deterministic SGLang excludes `min_p`"
    assert spell_name("run_has_a_length") == "Run has a length"


def test_the_tests_and_pictures_that_the_page_names_exist() -> None:
    root, page = FOLDER.parents[1], make_page()
    tests = {*GOLDEN.values(), *re.findall(r"`(tests/\S+\.py)`", page)}
    pictures = re.findall(r"!\[curve of \w+\]\((\S+)\)", page)
    assert len(pictures) == len(read_options()) + 1 + len(ADDITIONS), "every row has one, your own loss too"
    assert [file for file in tests if not (root / file).is_file()] == []
    assert [file for file in pictures if not (FOLDER / file).is_file()] == []


def test_the_numbers_of_an_addition_are_in_the_test_that_is_named() -> None:
    for each in ADDITIONS:
        assert each.function.__name__ in (FOLDER.parents[1] / GOLDEN[each.function.__name__]).read_text()
