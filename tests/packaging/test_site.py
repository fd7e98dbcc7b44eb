"""The site of the documentation builds without a warning, loads nothing from elsewhere, and is searchable."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
    "embed": "src",
}
"""Element -> the attribute whose address a browser loads without a click."""


class LoadedAddresses(HTMLParser):
    """Addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        # These two only name pages, for search engines and for reading on.
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        self.found += [value for value in (given.get(LOADED.get(tag, "")), given.get("srcset")) if value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        # Not with --quiet: it hides warnings from --strict, too.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def is_foreign(address: str) -> bool:
    return re.match(r"(https?:)?//", address.strip()) is not None


def test_the_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 90
    for page in pages:
        reader = LoadedAddresses()
        reader.feed(page.read_text())
        assert len(reader.found) > 3, page
        assert [address for address in reader.found if is_foreign(address)] == [], page
    for sheet in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import )['\"]?([^'\") ]+)", sheet.read_text())
        assert [address for address in addresses if is_foreign(address)] == [], sheet


def test_the_search_finds_functions_keys_and_errors(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}
    assert {
        "reference/api/rlscale/#rlscale.config.load.load_config",
        "reference/api/algo/#rlscale.algo.losses.clipped_policy_loss",
        "reference/api/hooks/#rlscale.hook_protocols.LossFunction",
        "reference/api/types/#rlscale.types.Sample",
        "reference/api/config/#rlscale.config.groups.batch.BatchConfig",
    } <= places
    parts = re.split(index["config"]["separator"], "algo.eps_clip_high 0.28")
    assert parts == ["algo", "eps_clip_high", "0.28"], "a key is found without its group"
    text = " ".join(entry["text"] for entry in index["docs"])
    assert all(words in text for words in ("algo.eps_clip_high", "cluster must fit on the GPUs that Ray has"))


def test_the_api_pages_show_types_and_code(site: Path) -> None:
    page = (site / "reference" / "api" / "algo" / "index.html").read_text()
    plain = re.sub(r"<[^>]+>", "", page)
    assert "layout: TokenLayout" in plain, "signatures have types"
    example = plain[plain.index("from rlscale.algo import ClipRange") :]
    assert example.index("\nlosses_T, sums = ") < 300, "the lines of an example are apart"
    assert "__post_init__" not in plain
