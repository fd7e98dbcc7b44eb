"""Writes data/shapes/: pictures of squares, to be counted.

    python -m scripts.make_shapes            # writes train.jsonl and heldout.jsonl
    python -m scripts.make_shapes --check    # exit code 1 unless the files are exactly what would be written

A row is `{"prompt": "<image>", "label": "3", "images": ["data:image/png;base64,..."]}`. A picture has 16 x 16 pixels
and one to five squares in a grid of four cells a side, each of one of three colours, on a dark ground. Cells and
colours come from the SHA-256 of the number of the picture, so the files are identical on every machine. Each number of
squares has a fifth of the training file, in which pictures of a single square, of which few differ, are repeated: a
policy stops to try an answer that is rarely right. No held-out picture is in the training file.
"""

import base64
import hashlib
import json
import random
import struct
import zlib
from collections import defaultdict
from pathlib import Path

from scripts.data_files import write_or_check

FOLDER = Path(__file__).resolve().parents[1] / "data" / "shapes"
NUM_TRAIN, NUM_HELDOUT = 4000, 256
MAX_SQUARES = 5
SIDE, CELL, MARGIN = 16, 4, 1
COLOURS = ((230, 60, 60), (60, 200, 80), (80, 120, 240))
GROUNDS = tuple((shade, shade, shade) for shade in range(0, 96, 6))

Picture = tuple[int, tuple[tuple[int, ...], ...]]
"""Index of the ground, and rows of pixels: 0 is the ground, the next numbers are the colours."""


def draw(number: int) -> tuple[Picture, int]:
    """A picture and its number of squares."""
    chance = random.Random(hashlib.sha256(f"shapes {number}".encode()).digest())
    count = 1 + number % MAX_SQUARES
    pixels = [[0] * SIDE for _ in range(SIDE)]
    cells = [(row, column) for row in range(SIDE // CELL) for column in range(SIDE // CELL)]
    for row, column in chance.sample(cells, count):
        colour = chance.randint(1, len(COLOURS))
        for y in range(row * CELL + MARGIN, (row + 1) * CELL - MARGIN):
            for x in range(column * CELL + MARGIN, (column + 1) * CELL - MARGIN):
                pixels[y][x] = colour
    return (chance.randrange(len(GROUNDS)), tuple(map(tuple, pixels))), count


def encode_png(picture: Picture) -> bytes:
    """A PNG with a palette. Written here: compressed bytes depend on the version of a library."""
    ground, pixels = picture
    # Four bits a pixel, the left one first; a zero before each row means that it has no filter.
    rows = b"".join(b"\0" + bytes(16 * a + b for a, b in zip(line[::2], line[1::2], strict=True)) for line in pixels)
    # A stored block needs no compressor: its length, the complement, the bytes.
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(rows), len(rows) ^ 0xFFFF) + rows
    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 4, 3, 0, 0, 0)
    colours = bytes(value for colour in (GROUNDS[ground], *COLOURS) for value in colour)
    data = stored + struct.pack(">I", zlib.adler32(rows))
    chunks = ((b"IHDR", header), (b"PLTE", colours), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def contents() -> dict[str, str]:
    """Text of each file by its name."""
    train, heldout, number = defaultdict[int, list[str]](list), dict[Picture, str](), 0
    share = NUM_TRAIN // MAX_SQUARES
    while sum(map(len, train.values())) < NUM_TRAIN:
        key, count = draw(number)
        if len(heldout) < NUM_HELDOUT:
            heldout.setdefault(key, row(number))
        elif key not in heldout and len(train[count]) < share:
            train[count].append(row(number))
        number += 1
    rows = [text for texts in zip(*(train[count] for count in sorted(train)), strict=True) for text in texts]
    return {"train.jsonl": "".join(rows), "heldout.jsonl": "".join(heldout.values())}


def row(number: int) -> str:
    """One line of a file."""
    picture, count = draw(number)
    url = "data:image/png;base64," + base64.b64encode(encode_png(picture)).decode()
    return json.dumps({"prompt": "<image>", "label": str(count), "images": [url]}) + "\n"


if __name__ == "__main__":
    write_or_check(FOLDER, contents())
