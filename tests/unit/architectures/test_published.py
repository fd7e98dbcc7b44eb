"""Parameters of the models in conf/model, compared with those that their makers publish."""

from functools import cache
from pathlib import Path

import pytest

from rlscale.architectures.architecture import Architecture
from rlscale.config import ModelBuild, load_config_with_notes
from rlscale.plan.model_size import policy_architecture

FOLDER = Path(__file__).parents[3] / "conf" / "model"

# In billions, from the model card or report, or from llama.cpp's count of the released weights: without multi-token
# prediction layers, and with a tied output layer counted once.
PUBLISHED = {
    "qwen3_0_6b": 0.596,
    "qwen3_1_7b": 1.721,
    "qwen3_4b": 4.022,
    "qwen3_4b_base": 4.022,
    "qwen3_8b": 8.191,
    "qwen3_14b": 14.768,
    "qwen3_32b": 32.762,
    "qwen3_30b_a3b": 30.532,
    "qwen3_235b_a22b": 235.094,
    "qwen25_0_5b": 0.494,
    "qwen25_1_5b": 1.544,
    "qwen25_3b": 3.086,
    "qwen25_7b": 7.616,
    "qwen25_14b": 14.770,
    "qwen25_32b": 32.764,
    "qwen25_72b": 72.706,
    "qwen25_vl_7b": 8.292,
    "qwen3_vl_4b": 4.438,
    "llama31_8b": 8.030,
    "llama31_70b": 70.554,
    "llama32_1b": 1.236,
    "llama32_3b": 3.213,
    "glm4_9b": 9.400,
    "glm45_106b_a12b": 106.85,
    "glm45_355b_a32b": 355.0,
    "deepseek_v3": 671.03,
    "deepseek_r1": 671.03,
    "mimo_7b_rl": 7.621,  # without the layer for multi-token prediction; with it 7.83
    "moonlight_16b_a3b": 15.96,  # 15.29 in the report, without embedding and output layer
    "minimax_m25": 228.7,
    "glm47_flash": 29.94,
    "kimi_k2": 1026.41,  # of the weights; the card has "1T", the report 1.04 T
}
ACTIVE = {
    "qwen3_30b_a3b": 3.3,
    "qwen3_235b_a22b": 22.0,
    "glm45_106b_a12b": 12.0,
    "glm45_355b_a32b": 32.0,
    "deepseek_v3": 37.0,
    "moonlight_16b_a3b": 2.24,
    "minimax_m25": 10.0,
    "kimi_k2": 32.0,
}
"""From the model cards, rounded. Some include embedding and output layer, some do not."""

WITHOUT_FIELDS = {"hf"}
TINY = {model.value for model in ModelBuild}


@cache
def architecture(name: str) -> Architecture:
    overrides = [f"model={name}", "rollout=sglang", "model.warmup_experiment=null"]
    return policy_architecture(load_config_with_notes(overrides, to_run=False).config.model)


def test_every_model_file_is_compared() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {*PUBLISHED, *WITHOUT_FIELDS, *TINY}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_match_the_published_ones(name: str) -> None:
    assert architecture(name).parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_match_the_published_ones(name: str) -> None:
    a = architecture(name)
    assert a.active_parameters - 2 * a.vocab_size * a.hidden_size <= ACTIVE[name] * 1e9 * 1.02
    assert a.active_parameters >= ACTIVE[name] * 1e9 * 0.98
    assert a.active_parameters < a.parameters / 4
