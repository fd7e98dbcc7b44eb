"""The option of `model` that an architecture gets."""

import pytest

from rlscale.migration.model_option import find_option, option_values

QWEN3_4B = {path: value for path, value in option_values("model", "qwen3_4b").items() if path.startswith("model.num_")}
SIZES = {**QWEN3_4B, "model.hidden_size": 2560, "model.rotary_base": 5000000}


@pytest.mark.parametrize(
    ("checkpoint", "has_images", "option"),
    [
        ("/root/Qwen3-4B-Instruct-2507/", False, "qwen3_4b"),
        ("/root/qwen3-4b-sft", False, "qwen3_4b"),
        ("Qwen/Qwen3-4B-Base", False, "qwen3_4b_base"),
        # The decoder of Qwen3-VL-4B has the sizes of Qwen3-4B.
        ("/root/models/Qwen3-VL-4B-Instruct", True, "qwen3_vl_4b"),
    ],
)
def test_models_with_equal_decoders_are_told_apart_by_name_and_images(
    checkpoint: str, has_images: bool, option: str
) -> None:
    assert find_option(checkpoint, SIZES, has_images=has_images) == option
