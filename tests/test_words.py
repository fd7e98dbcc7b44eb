"""Names and prose keep the rule of words; and the checks find a breach of each kind."""

from pathlib import Path

import pytest

from tests.words import EXCEPTIONS, MAX_COMMENTS, MIN_COMMENTS, comment_density, find_names, find_phrases

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rlscale"
PROSE = ("src", "tests", "conf", "docs", "bin", "scripts", "plugins", "benchmarks")
SUFFIXES = (".py", ".md", ".yaml", ".sh", ".toml", "")
SKIPPED = ("tests/words.py", "tests/test_words.py", "tests/data/", "docs/images/")
"""The list of banned phrases itself, and files that come from elsewhere."""


def prose_files() -> list[Path]:
    """Texts of the project that a person reads."""
    files = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml")]
    files += [path for folder in PROSE for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    return [
        path
        for path in files
        if path.suffix in SUFFIXES
        and "__pycache__" not in path.parts
        and not path.relative_to(ROOT).as_posix().startswith(SKIPPED)
    ]


def test_names_follow_the_rule_of_words() -> None:
    breaches = find_names(SOURCE)
    assert not breaches, "\n" + "\n".join(breaches)


def test_prose_follows_the_rule_of_words() -> None:
    breaches = find_phrases(prose_files())
    assert not breaches, "\n" + "\n".join(breaches)


def test_every_exception_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


def test_comments_are_neither_rare_nor_everywhere() -> None:
    assert MIN_COMMENTS <= comment_density(SOURCE) <= MAX_COMMENTS


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        ('"""What a thing is."""', "a.py: module (docstring starts with 'What')"),
        ('"""A."""\ndef f():\n    """Of a thing."""', "a.py: f (docstring starts with 'Of')"),
        ('class A:\n    x: int = 0\n    """When it ends."""', "a.py: x (docstring starts with 'When')"),
        ("def tell_all(): ...", "a.py: tell_all (name contains tell)"),
        ("class RestingPool: ...", "a.py: RestingPool (name contains resting)"),
        ("def f(nobody_here): ...", "a.py: nobody_here (name contains nobody)"),
        ("x_beside = 1", "a.py: x_beside (name contains beside)"),
        ("def f(self):\n    self.story = 1", "a.py: story (name contains story)"),
    ],
)
def test_a_planted_name_is_found(tmp_path: Path, text: str, breach: str) -> None:
    (tmp_path / "a.py").write_text(f"{text}\n")
    assert find_names(tmp_path, exceptions={}) == [breach]


def test_names_that_occur_twice_are_found(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("class Same: ...\nclass _Private: ...\n")
        (tmp_path / folder / "backend.py").write_text("")
    assert find_names(tmp_path, exceptions={}) == [
        "x/same.py: Same (class name is also in y/same.py)",
        "x/same.py: same (module basename is also in y/same.py)",
    ]


def test_an_exception_excuses_one_name_and_must_be_needed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def put(): ...\n")
    exceptions = {"a.py: put": "a reason", "a.py: gone": "a reason"}
    assert find_names(tmp_path, exceptions=exceptions) == ["a.py: gone: exception is not needed"]


@pytest.mark.parametrize(
    "phrase",
    [
        "nobody is told",
        "it goes on",
        "beside the loop",
        "they take turns",
        "we look at it",
        "leave it out",
        "rows are left out",
        "leaving out rows",
        "ranks, each of which waits",
    ],
)
def test_a_planted_phrase_is_found(tmp_path: Path, phrase: str) -> None:
    (tmp_path / "a.md").write_text(f"First line.\nThen {phrase}.\n")
    found = find_phrases([tmp_path / "a.md"])
    assert found
    assert all(line.startswith(f"{tmp_path / 'a.md'}:2: ") for line in found)


def test_comments_are_counted_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# one\nx = 1  # not a line of its own\n\ny = '# no comment'\n")
    assert comment_density(tmp_path) == 50.0


def test_the_changelog_has_at_most_thirty_lines_a_version() -> None:
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert versions
    for version in versions:
        assert version.count("\n") <= 30, version.splitlines()[0]
