"""Parts of the samples of a dump that are too large for its lines, in files next to it.

7.jsonl                     the samples, one line each
7.jsonl.routes.safetensors  expert routes: a tensor for each sample that has some, by the number of its line from 0
7.jsonl.images.json         images: each once, by hash; and the hashes of each sample that has some, by its line
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlscale.errors import DataError
from rlscale.expert_routes import RouteIds
from rlscale.images import Image, build_images
from rlscale.types import Sample


def write_routes(path: Path, samples: Sequence[Sample]) -> None:
    """Writes the routes of the samples of the dump `path`, in the order of its lines."""
    routes = {str(row): sample.routes for row, sample in enumerate(samples) if sample.routes is not None}
    file = _routes_file(path)
    if not routes:
        # A file of an earlier run would not match the new samples.
        file.unlink(missing_ok=True)
        return
    temporary = file.with_name(f".{file.name}.tmp")
    save_file(routes, temporary)
    temporary.replace(file)


def read_routes(path: Path) -> dict[int, RouteIds]:
    """Routes of the samples in the dump `path`, by row from 0. Empty if the dump has no routes.

    Raises DataError if the routes file cannot be read.
    """
    file = _routes_file(path)
    if not file.exists():
        return {}
    try:
        return {int(row): routes for row, routes in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} must hold the routes of samples, got {cause}; dump it again") from error


def write_images(path: Path, samples: Sequence[Sample]) -> None:
    """Writes the images of the samples of the dump `path`, as texts that need no other file."""
    file, images = _images_file(path), dict[str, Any]()
    for image in (image for sample in samples for image in sample.images):
        if image.digest not in images:
            images[image.digest] = asdict(replace(image, uri=image.data_url()))
    if not images:
        file.unlink(missing_ok=True)  # as above
        return
    rows = {str(row): [image.digest for image in sample.images] for row, sample in enumerate(samples) if sample.images}
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps({"images": images, "samples": rows}), encoding="utf-8")
    temporary.replace(file)


def read_images(path: Path) -> dict[int, tuple[Image, ...]]:
    """Images of the samples in the dump `path`, by row from 0. Empty if the dump has none.

    Raises DataError if the file of the images cannot be read.
    """
    file = _images_file(path)
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        images = dict(zip(content["images"], build_images(list(content["images"].values())), strict=True))
        return {int(row): tuple(images[each] for each in hashes) for row, hashes in content["samples"].items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} must hold the images of samples, got {cause}; dump it again") from error


def _routes_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.routes.safetensors")


def _images_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.images.json")
