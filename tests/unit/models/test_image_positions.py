"""Placeholders and positions of images, compared with transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlscale.architectures.hf_config import read_config_json
from rlscale.architectures.vision import Grid, VisionLayout, rotary_rows
from rlscale.config import ModelBuild
from rlscale.models.hf_models import build_causal_lm
from rlscale.models.image_positions import image_positions, place_images
from tests.tiny_vision import VISION_BUILDS, write_tiny_vision

LAYOUT = VisionLayout(image_token=9, start_token=7, merge_size=2, patch_size=4, rotary_sections=(4, 6, 6))


def test_a_placeholder_is_repeated_for_each_feature_of_its_image() -> None:
    assert LAYOUT.expand([1, 7, 9, 8, 7, 9, 8], [(1, 4, 4), (1, 2, 4)]) == (1, 7, 9, 9, 9, 9, 8, 7, 9, 9, 8)


@pytest.mark.parametrize("grids", [[], [(1, 4, 4), (1, 4, 4)]])
def test_placeholders_must_be_as_many_as_images(grids: list[Grid]) -> None:
    with pytest.raises(ValueError, match=f"one placeholder for each of its {len(grids)} images, got 1"):
        LAYOUT.expand([1, 7, 9, 8], grids)


def test_generated_placeholders_are_text() -> None:
    ids = np.asarray([7, 9, 9, 8, 9, 7, 9, 8, 7, 9, 9, 9, 9, 8, 7, 9])
    assert place_images(LAYOUT, ids, [(1, 2, 4), (1, 4, 4)]) == [1, 9]


def test_an_image_without_its_placeholders_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image 2 must have 4 placeholder tokens, got runs of \[2, 3\]"):
        place_images(LAYOUT, np.asarray([7, 9, 9, 8, 7, 9, 9, 9, 8]), [(1, 2, 4), (1, 4, 4)])


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_positions_and_rotary_angles_are_those_of_transformers(build: ModelBuild, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    config, model = read_config_json(folder), build_causal_lm(folder, dtype=torch.float32)
    layout = VisionLayout.from_config_json(config)
    grids: list[Grid] = [(1, 4, 6), (1, 8, 2)]
    start, image = layout.start_token, layout.image_token
    ids = layout.expand([5, 6, start, image, 8, start, image, 8, 5, 5], grids)
    starts = place_images(layout, np.asarray(ids), grids)
    found = image_positions(layout, len(ids), starts, grids)
    tokens = torch.tensor([ids])
    expected, _ = model.model.get_rope_index(
        tokens, mm_token_type_ids=(tokens == image).int(), image_grid_thw=torch.tensor(grids)
    )
    np.testing.assert_array_equal(found, expected[:, 0].numpy())
    # Frequency f turns by the position in row rows[f].
    rotary = model.model.language_model.rotary_emb
    rows = rotary_rows(layout.rotary_sections, interleaved=build == ModelBuild.tiny_qwen3_vl)
    cos, _ = rotary(torch.zeros(1, dtype=torch.float32), expected)
    angles = torch.from_numpy(found[rows].T) * rotary.inv_freq
    torch.testing.assert_close(cos[0, :, : len(rows)], angles.cos(), rtol=0, atol=1e-6)
