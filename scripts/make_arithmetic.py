"""Writes data/arithmetic/: sums of two three-digit numbers without carries.

    python -m scripts.make_arithmetic            # writes train.jsonl and heldout.jsonl
    python -m scripts.make_arithmetic --check    # exit code 1 unless the files are exactly what would be written

A row is `{"prompt": "470+205=", "label": "675", "metadata": {"a": 470, "b": 205}}`. Without carries every column is a
separate small sum, so a tiny model improves gradually instead of in one jump. One wrong column of three still makes the
answer wrong.

256 pairs are held out. The training file contains neither them nor their mirror images (205+470 for 470+205), so a
held-out sum cannot be memorised. SHA-256 of a pair determines the order of rows and the held-out pairs, so the files
are identical on every machine.
"""

import hashlib
import json
from pathlib import Path

from scripts.data_files import write_or_check

FOLDER = Path(__file__).resolve().parents[1] / "data" / "arithmetic"
NUM_NUMBERS = 1000
NUM_TRAIN = 10_000
NUM_HELDOUT = 256

Pair = tuple[int, int]


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs."""
    pairs = [(a, b) for a in range(NUM_NUMBERS) for b in range(NUM_NUMBERS) if not carries(a, b)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())
    heldout = pairs[:NUM_HELDOUT]
    excluded = {*heldout, *((b, a) for a, b in heldout)}
    return [pair for pair in pairs if pair not in excluded][:NUM_TRAIN], heldout


def carries(a: int, b: int) -> bool:
    """True when a column of a + b sums to ten or more."""
    return any(int(x) + int(y) > 9 for x, y in zip(f"{a:03}", f"{b:03}", strict=True))


def row(pair: Pair) -> str:
    """One line of a file."""
    a, b = pair
    fields = {"prompt": f"{a:03}+{b:03}=", "label": f"{a + b:03}", "metadata": {"a": a, "b": b}}
    return json.dumps(fields) + "\n"


def contents() -> dict[str, str]:
    """Text of each file by its name."""
    train, heldout = split_pairs()
    return {"train.jsonl": "".join(map(row, train)), "heldout.jsonl": "".join(map(row, heldout))}


if __name__ == "__main__":
    write_or_check(FOLDER, contents())
