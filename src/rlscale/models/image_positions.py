"""Places of images among tokens, and positions with three rows (frame, row and column).

    tokens   a  b  <start> P  P  P  P  <end>  c        one image of 2 x 2 merged patches
    frame    0  1     2    3  3  3  3    5    6
    row      0  1     2    3  3  4  4    5    6        text has the same number in all rows; it continues after the
    column   0  1     2    3  4  3  4    5    6        larger side of the image

Shape legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlscale.architectures.vision import Grid, VisionLayout
from rlscale.types import Int32, Int64

Ids = Int32 | Int64


def place_images(layout: VisionLayout, token_ids: Ids, grids: Sequence[Grid]) -> list[int]:
    """Index of the first placeholder of each image.

    An image is a run of placeholders after the start token, as long as its features. A model may also generate a
    placeholder; such a run has another length or comes after those of all images, and counts as text.

    Raises:
        ValueError: an image has no such run.
    """
    is_image = np.concatenate([[False], np.asarray(token_ids) == layout.image_token, [False]])
    # A change to True is the first token of a run, the next change the token after its last one.
    edges = np.flatnonzero(np.diff(is_image)).tolist()
    runs = [
        (start, stop - start)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
        if start and token_ids[start - 1] == layout.start_token
    ]
    starts, place = [], 0
    for number, grid in enumerate(grids, start=1):
        wanted = layout.num_tokens(grid)
        while place < len(runs) and runs[place][1] != wanted:
            place += 1
        if place == len(runs):
            lengths = [length for _, length in runs]
            raise ValueError(f"image {number} must have {wanted} placeholder tokens, got runs of {lengths}")
        starts.append(runs[place][0])
        place += 1
    return starts


def image_positions(layout: VisionLayout, num_tokens: int, starts: Sequence[int], grids: Sequence[Grid]) -> Int64:
    """Positions of the tokens of one sample whose images begin at `starts`. [3, T]"""
    found = np.empty((3, num_tokens), np.int64)
    token, position = 0, 0
    for start, (frames, rows, columns) in zip(starts, grids, strict=True):
        found[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        height, width = rows // layout.merge_size, columns // layout.merge_size
        stop = start + frames * height * width
        found[:, start:stop] = np.indices((frames, height, width)).reshape(3, -1) + position
        token, position = stop, position + max(height, width)
    found[:, token:] = np.arange(position, position + num_tokens - token)
    return found
