"""The command line of scripts that make a folder of data."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes files by their names; with `--check` exits with code 1 unless they are there with exactly this text."""
    parser = argparse.ArgumentParser(description=f"Writes data/{folder.name}/.")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    check = parser.parse_args().check
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        path = folder / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} must be what this script writes; run it without --check")
