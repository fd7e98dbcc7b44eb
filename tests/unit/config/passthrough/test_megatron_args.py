"""Group `megatron`: keys of Megatron-core are checked by name and type without the library."""

import json

import pytest

from rlscale.config import to_dict
from rlscale.config.keys import keys
from rlscale.config.load import load_config_with_notes
from rlscale.config.passthrough import megatron_args
from rlscale.config.passthrough.field_types import fits, type_in_words
from tests.unit.config.config_errors import config_errors, only_error


def test_fields_of_both_configs_are_keys_of_the_group() -> None:
    words = ["megatron.sequence_parallel=true", "megatron.overlap_param_gather=true", "megatron.bf16=false"]
    loaded = load_config_with_notes(words)
    assert loaded.config.megatron.core_args == {"sequence_parallel": True, "overlap_param_gather": True}
    assert to_dict(loaded.config)["megatron"]["sequence_parallel"] is True
    assert "megatron.sequence_parallel is ignored: train.backend is not megatron" in loaded.warnings


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("megatron.sequence_parallel=4", "megatron.sequence_parallel must be true or false, got 4"),
        ("megatron.moe_router_dtype=8", "megatron.moe_router_dtype must be"),
        ("megatron.sequence_paralel=true", "did you mean megatron.sequence_parallel?"),
        ("megatron.context_paralel_size=2", "did you mean megatron.context_parallel_size?"),
        ("megatron.tp=2", "did you mean megatron.tensor_model_parallel_size?"),
        ("megatron.pp_size=2", "did you mean megatron.pipeline_model_parallel_size?"),
        ("megatron.ep=2", "did you mean megatron.expert_model_parallel_size?"),
        ("megatron.cp=2", "did you mean megatron.context_parallel_size?"),
        ("megatron.num_layrs=2", "got 2; set model.num_layers (command line)"),
        ("megatron.recompute_layers=2", "did you mean megatron.recompute_num_layers?"),
        ("megatron.lr=1", "megatron.lr must not be set, because rlscale sets it, got 1; set optim.lr"),
        (
            "megatron.num_layers=1",
            "megatron.num_layers must not be set, because rlscale sets it, got 1; set model.num_layers",
        ),
        ("megatron.activation_func=gelu", "megatron.activation_func must not be set, got gelu; it is a Python object"),
        ("megatron.qqqqqqqq=1", "must be a key of this group or a field of Megatron-core 0.16.1's TransformerConfig"),
        ("megatron.rope_type=yran", "did you mean yarn?"),
    ],
)
def test_an_invalid_key_or_value_is_reported(word: str, message: str) -> None:
    assert message in only_error([word])


def test_errors_of_both_libraries_are_reported_together() -> None:
    found = config_errors("rollout=sglang", "sglang.pag_size=1", "megatron.tp=2", "megatron.lr=1")
    assert {line.split(" ")[0] for line in found} == {"sglang.pag_size", "megatron.tp", "megatron.lr"}


@pytest.mark.parametrize("word", ["megatron.position_embedding_type=ROPE", "swiglu=true", "use_rope_scaling=true"])
def test_what_the_model_decides_is_not_set(word: str) -> None:
    assert "; remove it: the model's config.json has it" in only_error([word])


def test_reserved_fields_have_keys() -> None:
    known = megatron_args.load_arguments().types
    assert set(known) >= set(megatron_args.RESERVED) | set(megatron_args.ABBREVIATIONS.values())
    advice = [fix for fix in megatron_args.RESERVED.values() if not fix.startswith("remove it: ")]
    assert {fix.split(" ")[1] for fix in advice} <= set(keys()) and len(advice) > 30


def test_every_recorded_type_can_be_checked_and_described() -> None:
    types = json.loads(megatron_args.RECORDED.read_text())["types"]
    assert len(types) > 250
    for kind in types.values():
        fits("?", kind)
        assert type_in_words(kind)
