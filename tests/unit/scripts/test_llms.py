"""The index for language models lists every page of the site, and the committed file is current."""

import re
from pathlib import Path

from scripts.docs.llms import first_sentence, make_llms_txt

ROOT = Path(__file__).parents[3]


def test_the_file_is_current() -> None:
    assert (ROOT / "docs" / "llms.txt").read_text() == make_llms_txt(), "run python -m scripts.docs.llms docs/llms.txt"


def test_every_page_of_the_documentation_is_listed_once() -> None:
    text = make_llms_txt()
    links = re.findall(r"^- \[[^\]]+\]\(([^)]*)\)", text, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    # mkdocs makes a folder of each page.
    expected = {page.removesuffix("index.md") if page.endswith("index.md") else f"{page[:-3]}/" for page in pages}
    expected = {address or "./" for address in expected}
    assert len(links) == len(set(links))
    assert set(links) == expected
    assert text.startswith("# rlscale\n\n> ")


def test_the_first_sentence_is_prose_without_links() -> None:
    page = "<!-- Generated. -->\n\n# Title\n\n```bash\nrun. it\n```\n\n| a |\n\nA [link](x.md) is\nhere. More.\n"
    assert first_sentence(page) == "A link is here"
    assert first_sentence("# Title\n\n| a |\n") == ""
