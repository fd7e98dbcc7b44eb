"""The field of a row that has its images, and their marks in its messages; opens no image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlscale.config import DataConfig
from rlscale.data.rows import Row
from rlscale.images import IMAGE_MARK


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
