"""Parameters of tools that take the images of the row: the policy neither sees nor sets them.

    annotation      the tool gets
    Image           the only image of the row; a row with none or several is refused
    Image | None    the same, or None
    list[Image]     all images of the row, possibly none

`Image` is that of Pillow.
"""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from rlscale.images import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from rlscale.types import Prompt


class ImageCount(StrEnum):
    """Images of a row that a parameter takes."""

    one = "one"
    one_or_none = "one or none"
    any = "any"

    def has(self, number: int) -> bool:
        """Whether a row with `number` images fits."""
        return number in {ImageCount.one: (1,), ImageCount.one_or_none: (0, 1)}.get(self, (number,))


def find_image_parameters(hints: Mapping[str, Any]) -> dict[str, ImageCount]:
    """The parameters that take images, by name; `hints` are the types of all parameters."""
    found = {name: _count(hint) for name, hint in hints.items() if name != "return"}
    return {name: count for name, count in found.items() if count is not None}


def _count(hint: Any) -> ImageCount | None:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _count(parts[0])
    if _is_picture(hint):
        return ImageCount.one
    if origin is list and _is_picture(parts[0]):
        return ImageCount.any
    if origin in (Union, types.UnionType) and len(parts) == 2 and type(None) in parts:
        (other,) = (each for each in parts if each is not type(None))
        return ImageCount.one_or_none if _is_picture(other) else None
    return None


def _is_picture(hint: Any) -> bool:
    # A function with such a parameter has imported Pillow.
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and hint is pillow.Image


def bind_images(parameters: Mapping[str, ImageCount], pictures: Sequence[Picture]) -> dict[str, Any]:
    """The arguments of these parameters.

    Raises:
        ValueError: the row has another number of images.
    """
    for name, count in parameters.items():
        if not count.has(len(pictures)):
            raise ValueError(f"the parameter {name} takes {count} of the row's images, got {len(pictures)}")
    return {
        name: list(pictures) if count == ImageCount.any else next(iter(pictures), None)
        for name, count in parameters.items()
    }


def open_pictures(images: Sequence[Image]) -> list[Picture]:
    """The images of a row as the model reads them, in RGB. Raises as `Image.read`."""
    return [_open(image.read()) for image in images]


def _open(content: bytes) -> Picture:
    # Imported here: an extra, which tools without images do not need.
    from PIL import Image as PillowImage

    with PillowImage.open(io.BytesIO(content)) as opened:
        return opened.convert("RGB")


def find_wrong_row(
    prompts: Sequence[Prompt], parameters: Mapping[str, Mapping[str, ImageCount]], *, source: str
) -> str | None:
    """The first row whose images do not fit the tools, as the text of an error; None: all fit.

    Args:
        parameters: of each tool, by its name.
        source: name of the file of the prompts.
    """
    for prompt in prompts:
        number = len(prompt.images)
        for name, own in parameters.items():
            for count in own.values():
                if not count.has(number):
                    rule = f"must have {count} image for the tool {name}, got {number}"
                    fix = "remove the row, or annotate the parameter with list[Image] or Image | None"
                    return f"{source} row {prompt.index + 1} {rule}; {fix}"
    return None
