from pathlib import Path

import numpy as np
import pytest

from rlscale.config import ModelBuild, ModelConfig
from rlscale.errors import ConfigError
from rlscale.images import digest_of, to_data_url
from rlscale.models.hf_models import load_tokenizer
from rlscale.models.image_processor import ImageProcessor, load_image_processor
from rlscale.models.resolve_model import resolve_model
from tests.tiny_vision import VISION_BUILDS, draw, open_image, write_tiny_vision


@pytest.fixture
def processor(tmp_path: Path) -> ImageProcessor:
    return load_image_processor(write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path))


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_a_picture_has_as_many_patches_as_its_grid_says(build: ModelBuild, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor = load_image_processor(folder)
    image = open_image(processor, 32, 16)
    assert image.grid == (1, 4, 8) and processor.layout.num_tokens(image.grid) == 8
    # 3 colours x 2 frames x 4 x 4 pixels.
    assert processor.pixels(image).shape == (32, 96)
    # The tokenizer has the placeholders of the config, one token each.
    ids = load_tokenizer(folder).encode("<|vision_start|><|image_pad|>", add_special_tokens=False)
    assert ids == [processor.layout.start_token, processor.layout.image_token]


def test_pixels_do_not_depend_on_where_the_bytes_are(processor: ImageProcessor, tmp_path: Path) -> None:
    content = draw(24, 24, seed=3)
    (tmp_path / "picture.png").write_bytes(content)
    from_file = processor.open(str(tmp_path / "picture.png"), content)
    from_url = processor.open(to_data_url(content), content)
    assert from_file.digest == from_url.digest == digest_of(content)
    assert from_file.data_url() == from_url.uri
    np.testing.assert_array_equal(processor.pixels(from_file), processor.pixels(from_url))
    other = open_image(processor, 24, 24, seed=4)
    assert other.digest != from_url.digest and (processor.pixels(other) != processor.pixels(from_url)).any()


def test_a_file_that_changes_during_the_run_is_refused(tmp_path: Path) -> None:
    folder, file = write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path), tmp_path / "picture.png"
    file.write_bytes(draw(16, 16))
    image = load_image_processor(folder).open(str(file), file.read_bytes())
    file.write_bytes(draw(16, 16, seed=1))
    with pytest.raises(ValueError, match="must not change during a run, got other bytes"):
        load_image_processor(folder).pixels(image)


def test_a_damaged_picture_is_refused(processor: ImageProcessor) -> None:
    with pytest.raises(ValueError, match="must be a complete file that Pillow reads"):
        processor.open("cut.png", draw(32, 32)[:80])


def test_a_model_without_images_is_refused(tmp_path: Path) -> None:
    folder = resolve_model(ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(tmp_path), num_layers=1))
    with pytest.raises(ConfigError, match="be a model with images"):
        load_image_processor(folder)
