"""Pixels of images as a model reads them: the image processor of a model folder, with Pillow alone.

The same call makes the pixels for the trainer and for the embedded engine, and SGLang loads the same file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import read_config_json
from rlscale.architectures.vision import VisionLayout
from rlscale.errors import ConfigError
from rlscale.images import Grid, Image, decode_picture, digest_of, read_uri
from rlscale.models.hf_models import checkpoint_problem
from rlscale.types import Float32

if TYPE_CHECKING:
    from transformers.image_processing_base import ImageProcessingMixin

MAX_CACHED_BYTES = 1 << 27
"""Pixels that a processor keeps: those of the images of a rollout's next micro-batches."""


class ImageProcessor:
    """Makes pixels of encoded images.

    Example:
        processor = load_image_processor("Qwen2.5-VL-3B-Instruct")
        image = processor.open("figures/7.png", content)
        processor.pixels(image).shape  # (patches, values of a patch)
    """

    def __init__(self, processor: ImageProcessingMixin, layout: VisionLayout) -> None:
        self._processor, self.layout = processor, layout
        self._cache: OrderedDict[str, tuple[Float32, Grid]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()  # an engine opens images outside of its decode thread

    @property
    def patch_values(self) -> int:
        """Values of one patch."""
        frames: int = self._processor.temporal_patch_size  # type: ignore[attr-defined]
        return 3 * frames * self.layout.patch_size**2

    def open(self, uri: str, content: bytes) -> Image:
        """The image with these encoded bytes.

        Raises:
            ValueError: they are no image that Pillow can decode, or its sides are too different.
        """
        digest = digest_of(content)
        found = self._find(digest)
        if found is None:
            found = self._process(content)
            self._keep(digest, *found)
        grid, layout = found[1], self.layout
        return Image(uri=uri, digest=digest, grid=grid, token=layout.image_token, num_tokens=layout.num_tokens(grid))

    def open_uri(self, uri: str) -> Image:
        """The image of a data URL; raises ValueError as `open`, and for anything that is no data URL."""
        if not uri.startswith("data:"):
            raise ValueError(f"an image must be a data URL, got {uri[:40]!r}; encode it as data:image/png;base64,...")
        return self.open(uri, read_uri(uri))

    def pixels(self, image: Image) -> Float32:
        """Values of the patches. [patches, values]

        Raises:
            OSError, ValueError: the image cannot be read any more, or has other patches than when it was opened.
        """
        pixels, grid = self._find(image.digest) or self._process(image.read())
        if grid != tuple(image.grid):
            raise ValueError(f"{image.uri[:80]} must have {image.grid} patches, got {grid} with this image processor")
        self._keep(image.digest, pixels, grid)
        return pixels

    def _find(self, digest: str) -> tuple[Float32, Grid] | None:
        with self._lock:
            found = self._cache.get(digest)
            if found is not None:
                self._cache.move_to_end(digest)
            return found

    def _process(self, content: bytes) -> tuple[Float32, Grid]:
        picture = decode_picture(content)
        made: Any = self._processor(images=[picture], return_tensors="np")  # type: ignore[operator]
        grid = tuple(int(each) for each in made["image_grid_thw"][0])
        assert len(grid) == 3, "a grid has frames, rows and columns"
        return np.ascontiguousarray(made["pixel_values"], np.float32), grid

    def _keep(self, digest: str, pixels: Float32, grid: Grid) -> None:
        with self._lock:
            if digest in self._cache:
                return
            self._cache[digest] = pixels, grid
            self._cached_bytes += pixels.nbytes
            while self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
                _, (oldest, _) = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.nbytes


def has_images(path: str) -> bool:
    """Whether the model of a folder or hub id reads images."""
    return find_family(read_config_json(path).get("model_type")).vision is not None


def load_image_processor(path: str) -> ImageProcessor:
    """Loads the image processor of a folder (without network) or of a hub id.

    Raises:
        ConfigError: transformers cannot read one there, or the model has no images.
    """
    # This class needs neither torchvision nor the video processor, which the whole processor of a model loads.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = read_config_json(path)
    if "vision_config" not in config:
        raise ConfigError(
            [checkpoint_problem("be a model with images", path, "choose one, or data.multimodal_keys=null")]
        )
    try:
        processor = Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=Path(path).is_dir())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([checkpoint_problem("have an image processor", path, error)]) from error
    return ImageProcessor(processor, VisionLayout.from_config_json(config))
