"""Layer patterns of Megatron-LM's command line become the number or list that they stand for."""

import pytest

from rlscale.config.load import load_config
from rlscale.config.passthrough.layer_pattern import read_pattern
from rlscale.errors import ConfigError

PATH = "megatron.moe_layer_freq"
RUN = ["experiment=quickstart", "train=megatron", "model.use_hf_config_for_megatron=true"]


def problems(given: str) -> list[str]:
    """Those of the key, with a model of one dense layer and three with experts."""
    try:
        load_config([*RUN, "model=tiny_deepseek_v3", f"{PATH}='{given}'"])
    except ConfigError as error:
        return [str(problem) for problem in error.problems if problem.path == PATH]
    return []


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("([0]*3+[1]*58)", [0] * 3 + [1] * 58),
        ("[0]*1+[1]*26", [0] + [1] * 26),
        ("[1]*4", [1, 1, 1, 1]),
        ("3*[1]", [1, 1, 1]),
        ("[0,1]*2", [0, 1, 0, 1]),
        (" [0, 1] ", [0, 1]),
        ("1", 1),
        ("(2)", 2),
    ],
)
def test_a_pattern_is_read(text: str, layers: object) -> None:
    assert read_pattern(PATH, text) == layers


@pytest.mark.parametrize(
    "text",
    ["", "[", "[]", "[[1],[0]]", "[1]*10**9", "[1]*99999", "[1]*-1", "1+1", "exit()", "[x]", "[1.5]", "[True]", "(1,)"],
)
def test_another_text_stays_as_it_is(text: str) -> None:
    assert read_pattern(PATH, text) == text


def test_other_keys_and_types_are_not_read() -> None:
    assert read_pattern("megatron.tp_comm_overlap_cfg", "[1]*4") == "[1]*4"
    assert read_pattern(PATH, [0, 1]) == [0, 1]


@pytest.mark.parametrize("given", ["([0]*1+[1]*3)", "[0]+[1]*3", "[0, 1, 1, 1]"])
def test_a_pattern_is_compared_by_its_meaning(given: str) -> None:
    assert problems(given) == []


def test_a_pattern_arrives_as_a_list() -> None:
    found = load_config([*RUN, "model=tiny_qwen3_moe", f"{PATH}='[1]*2'"])
    assert found.megatron.core_args["moe_layer_freq"] == [1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1]*4", f"{PATH} must be [0, 1, 1, 1], as in config.json, got [1, 1, 1, 1]; remove it"),
        ("1", f"{PATH} must be [0, 1, 1, 1], as in config.json, got 1; remove it"),
        ("[1]*", f"{PATH} must be an integer or a list (each entry an integer), got [1]*; remove it"),
    ],
)
def test_a_pattern_of_other_layers_is_refused(given: str, message: str) -> None:
    (problem,) = problems(given)
    assert problem.startswith(message)
