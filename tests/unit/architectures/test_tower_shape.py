"""Shapes of vision towers: those of transformers' own models, which have no memory here."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.hf_config import hf_fields, read_config_json
from rlscale.architectures.tower_shape import PUBLISHED, TowerShape, find_tower
from rlscale.config import ModelBuild
from rlscale.plan.frozen_parameters import list_parameters
from tests.tiny_vision import VISION_BUILDS, write_tiny_vision

# As in the config.json of the checkpoints on the hub.
QWEN2_5_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3_VL_4B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}


def transformers_shapes(config_json: dict[str, Any]) -> dict[str, int]:
    """Elements of every parameter of transformers' model, by name."""
    own = {name: value for name, value in config_json.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config_json["model_type"], **own))
    return {name: math.prod(parameter.shape) for name, parameter in model.named_parameters()}


def check(config_json: dict[str, Any], tower: TowerShape) -> int:
    """Compares the towers, and the sizes of the whole models; returns the latter."""
    expected = transformers_shapes(config_json)
    assert {name: math.prod(shape) for name, shape in tower.named_shapes()} == {
        name: size for name, size in expected.items() if ".visual." in name
    }
    a = replace(Architecture.from_fields(hf_fields(config_json)), tower=tower)
    assert a.parameters == sum(expected.values())
    assert {each.name: each.elements for each in list_parameters(a)} == expected
    return a.parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config_json", "billions"),
    [("Qwen/Qwen2.5-VL-7B-Instruct", QWEN2_5_VL_7B, 8.29), ("Qwen/Qwen3-VL-4B-Instruct", QWEN3_VL_4B, 4.44)],
)
def test_published_models_have_the_parameters_of_transformers(
    name: str, config_json: dict[str, Any], billions: float
) -> None:
    model_type = config_json["model_type"]
    tower = TowerShape.from_config(model_type, config_json["vision_config"])
    assert round(check(config_json, tower) / 1e9, 2) == billions
    assert find_tower(model_type, build=None, hf_checkpoint=name, width=0) == tower


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_tiny_models_have_the_parameters_of_transformers(build: ModelBuild, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    config_json = read_config_json(folder)
    found = find_tower(config_json["model_type"], build=None, hf_checkpoint=folder, width=0)
    assert found is not None
    check(config_json, found)
    assert found == find_tower(config_json["model_type"], build=build, hf_checkpoint=None, width=32)


def test_an_unknown_tower_is_none() -> None:
    assert find_tower("qwen3_vl", build=None, hf_checkpoint="someone/else", width=8) is None
    assert all(each["model_type"] in ("qwen2_5_vl", "qwen3_vl") for each in PUBLISHED.values())
