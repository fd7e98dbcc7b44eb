"""The command `rlscale-report`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import rlscale
from rlscale.cli.app import OK, WRONG_INPUT
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.errors import ConfigError, DataError, Problem
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
        text = render(run)
        page = Path(os.path.expanduser(page))
        _write(page, text)
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"rlscale-report: {error}\n")
        return WRONG_INPUT
    sys.stdout.write(f"{page}\n")
    if arguments.open:
        webbrowser.open(page.resolve().as_uri())
    return OK


def _write(page: Path, text: str) -> None:
    """Writes the page. Raises ConfigError if its folder or file cannot be written."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        # Texts of a run may have half a surrogate pair, which UTF-8 lacks.
        page.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise  # reported by the decorator of the command
        rule, value = "be a file that can be written", f"{page}, {error.strerror}"
        fix = "name another file"
        raise ConfigError([Problem(path="--out", rule=rule, value=value, fix=fix)]) from error


if __name__ == "__main__":
    sys.exit(main())
