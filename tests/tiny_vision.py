"""Tiny models with images, and pictures for them."""

import io
from pathlib import Path

from PIL import Image as PillowImage
from PIL import ImageDraw

from rlscale.config import ModelBuild, ModelConfig
from rlscale.images import Image, to_data_url
from rlscale.models.image_processor import ImageProcessor
from rlscale.models.resolve_model import resolve_model

VISION_BUILDS = (ModelBuild.tiny_qwen2_5_vl, ModelBuild.tiny_qwen3_vl)
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write_tiny_vision(build: ModelBuild, cache: Path, *, seed: int = 0) -> str:
    """The folder of a model of a build, smaller than by default."""
    fields = {**SMALL, "head_dim": 16, "num_key_value_heads": 1} if build == ModelBuild.tiny_qwen3_vl else SMALL
    return resolve_model(ModelConfig(build=build, init_seed=seed, cache_dir=str(cache), **fields))


def draw(width: int, height: int, *, seed: int = 0) -> bytes:
    """A picture with a rectangle that depends on the seed, as PNG."""
    picture = PillowImage.new("RGB", (width, height), (seed * 37 % 256, 90, 200))
    ImageDraw.Draw(picture).rectangle((seed % 5, 1, seed % 5 + 4, height - 2), fill=(255, seed * 11 % 256, 0))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def open_image(processor: ImageProcessor, width: int, height: int, *, seed: int = 0) -> Image:
    """A picture as the processor opens it."""
    content = draw(width, height, seed=seed)
    return processor.open(to_data_url(content), content)
