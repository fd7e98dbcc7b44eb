"""Writes data/arithmetic/: sums of two numbers from 0 to 99, training and held-out prompts.

    python scripts/make_arithmetic.py            # writes train.jsonl and heldout.jsonl
    python scripts/make_arithmetic.py --check    # exit code 1 unless the files are exactly what would be written

A row is `{"prompt": "47+05=", "label": "25", "metadata": {"a": 47, "b": 5}}`. The label is the sum with its digits
REVERSED (52 -> "25"), so that a carry goes from left to right, the way a model writes.

256 pairs are held out. The training file has neither them nor their mirror images (5+47 for 47+5), so a held-out sum
can only be found by adding. The order of rows, and what is held out, follow from SHA-256 of the pair: the files are the
same wherever they are made.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "data" / "arithmetic"
NUM_NUMBERS = 100
NUM_HELDOUT = 256

Pair = tuple[int, int]


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs."""
    pairs = [(a, b) for a in range(NUM_NUMBERS) for b in range(NUM_NUMBERS)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())
    heldout = pairs[:NUM_HELDOUT]
    excluded = {*heldout, *((b, a) for a, b in heldout)}
    return [pair for pair in pairs if pair not in excluded], heldout


def row(pair: Pair) -> str:
    """One line of a file."""
    a, b = pair
    fields = {"prompt": f"{a:02}+{b:02}=", "label": str(a + b)[::-1], "metadata": {"a": a, "b": b}}
    return json.dumps(fields) + "\n"


def contents() -> dict[str, str]:
    """Text of each file by its name."""
    train, heldout = split_pairs()
    return {"train.jsonl": "".join(map(row, train)), "heldout.jsonl": "".join(map(row, heldout))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes data/arithmetic/.")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in contents().items():
        path = FOLDER / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} must be what this script writes; run it without --check")


if __name__ == "__main__":
    main()
