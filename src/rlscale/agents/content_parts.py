"""Contents with images that tools and environments return: from their values to images that the model reads.

    PIL image, bytes, path, data URL ── process of the user code ──> data URL ── `run_images` ──> hash, placeholders

User code may return a PIL image, or a list of texts, PIL images and parts as `{"type": "image", "image": <value>}`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlscale.images import IMAGE_TYPE, image_digests, is_image_part, read_uri, to_data_url
from rlscale.renderers.renderer import Message

_TEXT_TYPES, _URL_TYPE = ("text", "input_text", "output_text"), "image_url"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
NO_IMAGES = "it returned an image, and the run reads none; set data.multimodal_keys={image: images}"
"""Error of user code that returns an image in a run without any."""


def image_contents(value: Any, *, cut: Callable[[str], str]) -> list[dict[str, str]] | None:
    """Content parts of a value, with images as data URLs; None: it has no image.

    Args:
        cut: shortens a text.

    Raises:
        OSError, ValueError: an image cannot be read, or the value has other things than texts and images.
    """
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, parts)):
        return None
    return [_part(each, cut) for each in parts]


def _is_image(part: Any) -> bool:
    return _is_picture(part) or is_image_part(part) or (isinstance(part, Mapping) and part.get("type") == _URL_TYPE)


def _is_picture(value: Any) -> bool:
    # A process that has not imported Pillow has none of its images.
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _part(part: Any, cut: Callable[[str], str]) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": cut(part)}
    if _is_picture(part):
        return {"type": IMAGE_TYPE, IMAGE_TYPE: _to_url(part)}
    if isinstance(part, Mapping) and part.get("type") in (IMAGE_TYPE, _URL_TYPE):
        value = part.get(part["type"])
        return {"type": IMAGE_TYPE, IMAGE_TYPE: _to_url(value.get("url") if isinstance(value, Mapping) else value)}
    if isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str):
        return {"type": "text", "text": cut(part["text"])}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"content with an image must have texts and images only, got {kind!r:.40}")


def _to_url(value: Any) -> str:
    if isinstance(value, bytes):
        return to_data_url(value)
    if _is_picture(value):
        buffer = io.BytesIO()
        # Other modes, e.g. CMYK, have no place in a PNG file.
        (value if value.mode in _PNG_MODES else value.convert("RGB")).save(buffer, "PNG")
        return to_data_url(buffer.getvalue())
    if isinstance(value, str | Path) and str(value).startswith(("http://", "https://")):
        raise ValueError(f"an image must be on this machine, got {str(value)[:60]}; download it and return its bytes")
    if isinstance(value, str | Path):
        return to_data_url(read_uri(str(value)))
    raise ValueError(f"an image must be a PIL image, bytes, a path or a data URL, got {type(value).__name__}")


def has_images(messages: Sequence[Message]) -> bool:
    """Whether a message has an image."""
    return bool(image_digests(messages))
