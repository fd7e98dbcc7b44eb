"""Images of a row of a prompt file, and their places in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.data.image_fields import image_values
from rlscale.data.rows import Row, json_type
from rlscale.images import IMAGE_MARK, Image, decode_base64, read_uri, split_marks, to_data_url
from rlscale.models.image_processor import ImageProcessor

_MIN_BASE64 = 64


def row_images(row: Row, key: str, processor: ImageProcessor) -> tuple[Image, ...]:
    """The images in a field of a row: one or a list. None and a missing field mean none.

    An image is a path relative to the file, a data URL, base64, bytes, or an object with `bytes` or `path` as in the
    parquet files of the library datasets.

    Raises:
        BadRowError: an image cannot be read or decoded.
    """
    return tuple(
        _read(row, each, f"image {number} under {key!r}", processor)
        for number, each in enumerate(image_values(row, key), 1)
    )


def with_image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template: a text with `<image>` becomes a list of texts and images."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: Any) -> Any:
    return split_marks(content) if isinstance(content, str) and IMAGE_MARK in content else content


def _read(row: Row, value: Any, name: str, processor: ImageProcessor) -> Image:
    try:
        uri, content = _content(row, value)
        return processor.open(uri, content)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise row.error(f"have an image as {name}; {text}", reason="no image") from error


def _content(row: Row, value: Any) -> tuple[str, bytes]:
    """Place of the encoded bytes during the run, and the bytes."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", "path", "image", "url") if value.get(name) is not None), None)
    if isinstance(value, bytes):
        return to_data_url(value), value
    if not isinstance(value, str) or not value:
        raise ValueError(f"it must be a path, base64 or bytes, got {json_type(value)}; correct data.multimodal_keys")
    if value.startswith(("http://", "https://")):
        raise ValueError(f"it must be on this machine, got {value[:60]}; download it and give its path")
    if value.startswith("data:"):
        return value, read_uri(value)
    path = row.folder / value
    # A long text that names no file is base64 without the head of a data URL.
    if len(value) >= _MIN_BASE64 and not _is_file(path):
        content = decode_base64(value)
        return to_data_url(content), content
    return str(path.absolute()), path.read_bytes()


def _is_file(path: Any) -> bool:
    try:
        return bool(path.is_file())
    except OSError:  # e.g. a name that is too long
        return False
