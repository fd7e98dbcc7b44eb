"""The command `rlscale-report`."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import rlscale
from rlscale.cli.app import OK, WRONG_INPUT
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.errors import ConfigError, DataError
from rlscale.observe.report import read_run, render

PAGE = "report.html"


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-report",
        description="Writes a run as one HTML page: curves, time by phase, distributions, and samples token by token.",
        epilog="The page needs no network. It can be written for unfinished and failed runs too.",
    )
    add = parser.add_argument
    add("run", type=Path, help="run folder, as rlscale-train prints it")
    add(
        "-o",
        "--out",
        type=Path,
        default=None,
        metavar="FILE",
        help=f"the page; default: {PAGE} in the run folder",
    )
    add("--open", action="store_true", help="open the page in a browser")
    add(
        "--max-samples",
        type=int,
        default=1000,
        metavar="N",
        help="maximum number of samples in the page, evenly spaced; also limited to 30 MB; default: 1000",
    )
    add("--version", action="version", version=f"rlscale {rlscale.__version__}")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page. Returns 0, or 2 when there is no run in the folder."""
    arguments = make_parser().parse_args(argv)
    page = arguments.out or arguments.run / PAGE
    try:
        run = read_run(Path(os.path.expanduser(arguments.run)), max_samples=max(0, arguments.max_samples))
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"rlscale-report: {error}\n")
        return WRONG_INPUT
    page = Path(os.path.expanduser(page))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(run), encoding="utf-8")
    sys.stdout.write(f"{page}\n")
    if arguments.open:
        webbrowser.open(page.resolve().as_uri())
    return OK


if __name__ == "__main__":
    sys.exit(main())
