"""Images of prompts: where their bytes are, and what the model makes of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA = "data:"
Grid = tuple[int, int, int]
"""Patches of an image: frames, rows, columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An encoded image (PNG, JPEG, ...) and the number of its patches. A value of JSON, so checkpoints can store it.

    Example:
        image = Image(uri="figures/7.png", digest=digest_of(content), grid=(1, 8, 8))
    """

    uri: str  # path of a file, or a data URL
    digest: str  # of the encoded bytes; images of equal digests are processed once
    grid: Grid

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


def to_data_url(content: bytes) -> str:
    """Encoded bytes as a data URL. Readers find the format in the bytes, so its name there does not matter."""
    return f"{_DATA}image/png;base64,{base64.b64encode(content).decode()}"


def build_images(values: Sequence[Mapping[str, Any]]) -> tuple[Image, ...]:
    """Images from the fields of each, as JSON has them."""
    return tuple(Image(**{**value, "grid": tuple(value["grid"])}) for value in values)


def digest_of(content: bytes) -> str:
    """Hash of the encoded bytes of an image."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
