"""Contents of messages in any chat API: a text, or parts of which some are images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlscale.gateway.apis.chat_request import InvalidRequest, shown, wrong
from rlscale.images import IMAGE_TYPE

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are images: of Chat Completions, Responses and Messages."""


def text_of(content: Any, place: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content: a string, or parts of a kind of text.

    Raises:
        InvalidRequest: a part is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return _checked(content, place)
    if not isinstance(content, list):
        raise wrong(place, "be a string or a list of parts", content)
    return "".join(_text_part(part, f"{place}[{number}]", kinds) for number, part in enumerate(content))


def content_of(content: Any, place: str, kinds: Sequence[str] = ("text",)) -> str | list[dict[str, str]]:
    """As `text_of`; a content with images is a list of texts and images, each of them as a data URL.

    Raises:
        InvalidRequest: a part is no text and no image with its bytes.
    """
    if not isinstance(content, list) or not any(map(is_image, content)):
        return text_of(content, place, kinds)
    return [part_of(part, f"{place}[{number}]", kinds) for number, part in enumerate(content)]


def part_of(part: Any, place: str, kinds: Sequence[str] = ("text",)) -> dict[str, str]:
    """A part of a content with images."""
    if is_image(part):
        return {"type": IMAGE_TYPE, IMAGE_TYPE: _data_url(part, place)}
    return {"type": "text", "text": _text_part(part, place, kinds)}


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image, in the form of any of the APIs."""
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _data_url(part: dict[str, Any], place: str) -> str:
    """The bytes of an image as a data URL: Messages has them in `source`, the others have a URL."""
    if part["type"] == "image":
        source, place = part.get("source"), f"{place}.source"
        if isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str):
            return f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
        raise wrong(place, "have the type base64 and data", source)
    url = part.get("image_url")
    if isinstance(url, dict):
        url, place = url.get("url"), f"{place}.image_url"
    if not isinstance(url, str) or not url.startswith("data:"):
        # An address would let an agent read files and servers of this machine.
        raise InvalidRequest(
            f"{place} must have a data URL, got {shown(url)}; encode the image as data:image/png;base64,...",
            param=place,
        )
    return url


def _text_part(part: Any, place: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise wrong(place, "be a JSON object", part)
    if part.get("type") not in kinds:
        raise InvalidRequest(
            f"{place}.type must be {' or '.join(kinds)}, got {shown(part.get('type'))}; it cannot be recorded",
            param=f"{place}.type",
        )
    if not isinstance(part.get("text"), str):
        raise wrong(f"{place}.text", "be a string", part.get("text"))
    return _checked(part["text"], f"{place}.text")


def _checked(text: str, place: str) -> str:
    """The text, unless it has a half of a surrogate pair, which JSON can contain and tokenizers fail at."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{place} must be valid Unicode, got {error.reason}", param=place) from error
    return text
