"""The field of a row that has its images, their bytes, and their marks in its messages; decodes no image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlscale.config import DataConfig
from rlscale.data.rows import BadRowError, Row, json_type
from rlscale.images import IMAGE_MARK, decode_base64, read_uri, to_data_url

_MIN_BASE64 = 64


def image_key(config: DataConfig) -> str | None:
    """The field of a row that has its images; None: the run reads none."""
    return (config.multimodal_keys or {}).get("image")


def image_values(row: Row, key: str) -> list[Any]:
    """The images of a row, as they are written in its field: one, a list, or a list as JSON text."""
    value = row.find(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # the name of a file may start so, too
            value = json.loads(value)
    return value if isinstance(value, list) else [] if value is None else [value]


def check_markers(row: Row, messages: Sequence[Mapping[str, Any]], key: str) -> None:
    """Raises BadRowError unless the messages have one `<image>` for each image of the row."""
    num_images = len(image_values(row, key))
    found = sum(str(message["content"]).count(IMAGE_MARK) for message in messages)
    if found == num_images:
        return
    fix = "correct the row"
    if num_images == 0 and row.find(key) is None:
        fix = f"it has no field {key!r}: correct data.multimodal_keys or the row"
    raise row.error(
        f"have one {IMAGE_MARK} in its messages for each of its {num_images} images, got {found}; {fix}",
        reason="images without places",
    )


def image_name(number: int, key: str) -> str:
    """Name of an image of a row in messages. `number` counts from 1."""
    return f"image {number} under {key!r}"


def not_an_image(row: Row, name: str, error: OSError | ValueError) -> BadRowError:
    """The error of a row with an image that cannot be read or decoded."""
    return row.error(f"have an image as {name}; {' '.join(str(error).split())}", reason="no image")


def image_file(row: Row, value: Any) -> Path | None:
    """The file that a value names; None: it has the bytes itself.

    Raises:
        ValueError: it is no image that a row may have, or there is no such file.
    """
    value = _inner_value(value)
    if isinstance(value, bytes):
        return None
    if not isinstance(value, str) or not value:
        got = "an empty string" if value == "" else json_type(value)
        raise ValueError(f"it must be a path, base64 or bytes, got {got}; correct data.multimodal_keys")
    if value.startswith(("http://", "https://")):
        raise ValueError(f"it must be on this machine, got {value[:60]}; download it and give its path")
    if value.startswith("data:"):
        return None
    path = row.folder / value
    if _is_file(path):
        return path
    if len(value) < _MIN_BASE64:
        raise ValueError(f"{path} must be a file; correct the path")
    return None  # a long text that names no file is base64 without the head of a data URL


def image_content(row: Row, value: Any) -> tuple[str, bytes]:
    """Place of the encoded bytes during the run, and the bytes.

    Raises:
        OSError, ValueError: the file cannot be read, or it is no image that a row may have.
    """
    path = image_file(row, value)
    if path is not None:
        return str(path.absolute()), path.read_bytes()
    value = _inner_value(value)
    if isinstance(value, bytes):
        return to_data_url(value), value
    if value.startswith("data:"):
        return value, read_uri(value)
    content = decode_base64(value)
    return to_data_url(content), content


def _inner_value(value: Any) -> Any:
    """The image in an object with `bytes` or `path`, as the library datasets writes them."""
    if not isinstance(value, Mapping):
        return value
    return next((value[name] for name in ("bytes", "path", "image", "url") if value.get(name) is not None), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # e.g. a name that is too long
        return False
