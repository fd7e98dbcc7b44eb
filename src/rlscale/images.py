"""Images of prompts: where their bytes are, and what the model makes of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image as PillowImage

_DATA = "data:"
IMAGE_MARK = "<image>"
"""Marks the place of an image in the text of a message."""

IMAGE_TYPE = "image"
"""Type of a content part that is an image; its key of the same name has the hash of the encoded bytes."""

Grid = tuple[int, int, int]
"""Patches of an image: frames, rows, columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An encoded image (PNG, JPEG, ...) and the number of its patches. A value of JSON, so checkpoints can store it.

    Example:
        image = Image(uri="figures/7.png", digest=digest_of(content), grid=(1, 8, 8), token=107, num_tokens=16)
    """

    uri: str  # path of a file, or a data URL
    digest: str  # of the encoded bytes; images of equal digests are processed once
    grid: Grid
    token: int  # its placeholder among token ids
    num_tokens: int  # placeholders in a row

    def read(self) -> bytes:
        """The encoded bytes.

        Raises:
            OSError: the file cannot be read any more.
            ValueError: its content has changed since the prompt was made.
        """
        content = read_uri(self.uri)
        if digest_of(content) != self.digest:
            raise ValueError(f"{self.uri[:80]} must not change during a run, got other bytes; start the run again")
        return content

    def data_url(self) -> str:
        """The image as a text that engines on other machines can read."""
        return self.uri if self.uri.startswith(_DATA) else to_data_url(self.read())


def read_uri(uri: str) -> bytes:
    """The bytes of a data URL or of a file.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    if not uri.startswith(_DATA):
        return Path(uri).read_bytes()
    head, comma, text = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(
            f"a data URL must have base64 content, got {uri[:40]!r}; encode it as data:image/png;base64,..."
        )
    return decode_base64(text)


def decode_base64(text: str) -> bytes:
    """The bytes of a text in base64. Raises ValueError for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"base64 must be valid, got {text[:40]!r}; {error}") from error


def decode_picture(content: bytes) -> PillowImage.Image:
    """The decoded image, in RGB.

    Raises:
        ValueError: the bytes are no image that Pillow can decode.
    """
    # Imported here: runs without images do not need it.
    from PIL import Image as PillowImage
    from PIL import UnidentifiedImageError

    try:
        with PillowImage.open(io.BytesIO(content)) as opened:
            # RGB here: transparency would otherwise become black or white depending on the format.
            return opened.convert("RGB")
    except UnidentifiedImageError as error:  # its text has the address of an object instead of the content
        raise ValueError(f"an image must be a complete file that Pillow reads, got {content[:16]!r}...") from error
    except (OSError, SyntaxError, PillowImage.DecompressionBombError) as error:
        raise ValueError(f"an image must be a complete file that Pillow reads, got {error}") from error


def to_data_url(content: bytes) -> str:
    """Encoded bytes as a data URL. Readers find the format in the bytes, so its name there does not matter."""
    return f"{_DATA}image/png;base64,{base64.b64encode(content).decode()}"


def build_images(values: Sequence[Mapping[str, Any]]) -> tuple[Image, ...]:
    """Images from the fields of each, as JSON has them."""
    return tuple(Image(**{**value, "grid": tuple(value["grid"])}) for value in values)


def split_marks(text: str) -> list[dict[str, str]]:
    """Content parts of a text: each `<image>` becomes a part that is an image."""
    first, *others = text.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}]
    for each in others:
        parts += [{"type": IMAGE_TYPE}, {"type": "text", "text": each}]
    return [part for part in parts if part.get("text") != ""]


def is_image_part(part: Any) -> bool:
    """Whether a content part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") == IMAGE_TYPE


def image_digests(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hashes of the images in messages, in the order of their places."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [str(part.get(IMAGE_TYPE)) for part in parts if is_image_part(part)]


def map_images(messages: Sequence[Mapping[str, Any]], change: Callable[[str], str]) -> list[Mapping[str, Any]]:
    """Copies of messages in which the values of image parts, hashes or places, are changed."""

    def changed(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            {**part, IMAGE_TYPE: change(str(part[IMAGE_TYPE]))} if is_image_part(part) else part for part in content
        ]

    return [{**message, "content": changed(message.get("content"))} for message in messages]


def collapse_placeholders(token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
    """Token ids with one placeholder for each image: SGLang repeats it as often as the image has features.

    Raises:
        ValueError: there are other placeholders, e.g. one that the model generated: SGLang would take it for an image.
    """
    if not images:
        return list(token_ids)
    found, place, token = list[int](), 0, images[0].token
    for image in images:
        if token not in token_ids[place:]:
            raise ValueError(f"an image must have {image.num_tokens} placeholder tokens, got none")
        start = token_ids.index(token, place)
        stop = start + image.num_tokens
        if any(each != token for each in token_ids[start:stop]) or len(token_ids) < stop:
            raise ValueError(f"an image must have {image.num_tokens} placeholder tokens at token {start}, got fewer")
        found += [*token_ids[place:start], token]
        place = stop
    if token in token_ids[place:]:
        raise ValueError(f"a prompt must have no placeholder but those of its {len(images)} images, got one more")
    return found + list(token_ids[place:])


def image_file_name(digest: str, content: bytes) -> str:
    """Name of the file of an image: its hash, with the usual ending of its format."""
    endings = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
    return digest + next((ending for start, ending in endings.items() if content.startswith(start)), "")


def digest_of(content: bytes) -> str:
    """Hash of the encoded bytes of an image."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
