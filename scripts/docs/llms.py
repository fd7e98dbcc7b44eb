"""Writes `llms.txt`, the index of the documentation for language models: `python -m scripts.docs.llms docs/llms.txt`.

The format is that of llmstxt.org: a title, a summary, and a list of links with descriptions for each part of the site.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]

_SUMMARY = """# rlscale

> rlscale post-trains language models with reinforcement learning. `rlscale-train <overrides>` composes a typed Hydra
> configuration, checks it before anything starts, and runs the loop generate, reward, train, sync weights with Ray,
> trainers on FSDP2 or Megatron-core and inference engines behind HTTP. It runs on a CPU with tiny models; on GPUs,
> tests and short runs of tiny models have run, and no large model.

Keys are `group.name=value`; `rlscale-config help <key>` explains one. A run writes `metrics.jsonl` into its run folder.
"""


def make_llms_txt(root: Path = ROOT) -> str:
    """The text: one section for each part of the site's navigation, one line for each page."""
    site = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {}
    for part, title, path in _pages(site["nav"], "Start"):
        text = (root / site["docs_dir"] / path).read_text(encoding="utf-8")
        about = first_sentence(text)
        sections.setdefault(part, []).append(f"- [{title}]({_address(path)})" + (f": {about}" if about else ""))
    return "\n".join((_SUMMARY, *(f"## {part}\n\n" + "\n".join(lines) + "\n" for part, lines in sections.items())))


def first_sentence(page: str) -> str:
    """The first sentence of the first paragraph of plain text, without its links; empty if a page has none."""
    prose = re.sub(r"<!--.*?-->|```.*?```", "", page, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", prose):
        # Headings, tables, lists, notes and directives of mkdocstrings are not prose.
        if paragraph.strip() and not re.match(r"\s*(#|\||[-*] |!|:::|\d+\. |>| {4})", paragraph):
            plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", plain)[0].rstrip(".:")
    return ""


def _pages(nav: list[Any], part: str) -> Iterator[tuple[str, str, str]]:
    """Part, title and path of each page, in the order of the navigation."""
    for entry in nav:
        ((title, below),) = entry.items()
        if isinstance(below, str):
            yield part, title, below
        else:
            yield from _pages(below, title)


def _address(path: str) -> str:
    """Address of a page on the site, relative to its root: mkdocs makes a folder of each page."""
    return path.removesuffix("index.md") or "./" if path.endswith("index.md") else path.removesuffix(".md") + "/"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the file that is the only argument."""
    parser = argparse.ArgumentParser(prog="python -m scripts.docs.llms", description=main.__doc__)
    parser.add_argument("file", type=Path, help="e.g. docs/llms.txt")
    parser.parse_args(argv).file.write_text(make_llms_txt(), encoding="utf-8")


if __name__ == "__main__":
    main()
