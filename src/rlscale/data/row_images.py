"""Images of a row of a prompt file, and their places in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.data.image_fields import image_content, image_name, image_values, not_an_image
from rlscale.data.rows import Row
from rlscale.images import IMAGE_MARK, Image, split_marks
from rlscale.models.image_processor import ImageProcessor


def row_images(row: Row, key: str, processor: ImageProcessor) -> tuple[Image, ...]:
    """The images in a field of a row: one or a list. None and a missing field mean none.

    An image is a path relative to the file, a data URL, base64, bytes, or an object with `bytes` or `path` as in the
    parquet files of the library datasets.

    Raises:
        BadRowError: an image cannot be read or decoded.
    """
    return tuple(
        _read(row, each, image_name(number, key), processor) for number, each in enumerate(image_values(row, key), 1)
    )


def with_image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template: a text with `<image>` becomes a list of texts and images."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: Any) -> Any:
    return split_marks(content) if isinstance(content, str) and IMAGE_MARK in content else content


def _read(row: Row, value: Any, name: str, processor: ImageProcessor) -> Image:
    try:
        return processor.open(*image_content(row, value))
    except (OSError, ValueError) as error:
        raise not_an_image(row, name, error) from error
