"""Check of the images of the first rows of a prompt file, before a run."""

from __future__ import annotations

from rlscale.data.image_fields import image_content, image_file, image_name, image_values, not_an_image
from rlscale.data.rows import Row
from rlscale.images import decode_picture

MAX_PIXELS, MAX_BYTES = 20_000_000, 1 << 25
"""Pixels that are decoded, and bytes that are read for them: both take less than a second."""


class FirstImages:
    """Checks images row by row. Those within the limits are decoded; of later ones only the files must exist."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._num_pixels = self._num_bytes = 0

    def check(self, row: Row) -> None:
        """Raises BadRowError if an image of the row cannot be read or decoded."""
        for number, value in enumerate(image_values(row, self._key), 1):
            try:
                if self._num_pixels < MAX_PIXELS and self._num_bytes < MAX_BYTES:
                    self._decode(row, value)
                else:
                    image_file(row, value)
            except (OSError, ValueError) as error:
                raise not_an_image(row, image_name(number, self._key), error) from error

    def _decode(self, row: Row, value: object) -> None:
        _, content = image_content(row, value)
        width, height = decode_picture(content).size
        self._num_pixels += width * height
        self._num_bytes += len(content)
