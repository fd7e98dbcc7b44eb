"""Tiny models of the structure of every option of conf/model."""

from dataclasses import replace

import pytest

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.hf_config import hf_fields
from rlscale.architectures.megatron_fields import MegatronKeys, check_architecture, megatron_fields
from rlscale.rehearsal.cut_layout import LayoutSizes
from rlscale.rehearsal.tiny_family import StageShape, tiny_config_json
from tests.unit.rehearsal.model_options import MEGATRON_OPTIONS, OPTIONS, model_fields

SIZES = LayoutSizes(nodes=2, gpus=8, gpus_per_node=8)
LAYOUTS = [
    SIZES,
    replace(SIZES, tensor=4, pipeline=4),
    replace(SIZES, tensor=8, pipeline=2, expert=8, expert_tensor=2),
]

KEPT = ("tied", "attention_bias", "qk_norm", "is_latent", "model_type", "num_norms")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=["tp1", "tp4_pp4", "tp8_ep8_etp2"])
def test_the_structure_is_kept_and_the_ranks_divide_it(option: str, sizes: LayoutSizes) -> None:
    fields = model_fields(option)
    config_json = tiny_config_json(fields, sizes, vocab_size=261)
    big, tiny = Architecture.from_fields(fields), Architecture.from_config_json(config_json)
    assert {name: getattr(tiny, name) for name in KEPT} == {name: getattr(big, name) for name in KEPT}
    assert (tiny.num_experts > 0, tiny.num_shared_experts > 0) == (big.num_experts > 0, big.num_shared_experts > 0)
    assert tiny.is_mixed == big.is_mixed and (tiny.q_rank > 0) == (big.q_rank > 0)
    assert (tiny.group_size > 1) == (big.group_size > 1 and not big.is_latent)
    assert tiny.parameters < 4e6
    # What rules/parallel.py requires of a real model.
    assert tiny.num_layers % sizes.pipeline == 0 and tiny.num_layers >= 2
    assert tiny.num_heads % sizes.tensor == 0
    assert tiny.num_kv_heads % sizes.tensor == 0 or sizes.tensor % tiny.num_kv_heads == 0
    assert tiny.intermediate_size % sizes.tensor == 0
    assert tiny.num_experts % sizes.expert == 0 and tiny.expert_size % sizes.expert_tensor == 0
    assert tiny.experts_per_token <= max(tiny.num_experts, 0)
    if big.num_experts and big.dense_layers:
        assert tiny.is_mixed


@pytest.mark.parametrize("option", MEGATRON_OPTIONS)
def test_megatron_core_supports_the_tiny_model(option: str) -> None:
    fields = model_fields(option)
    config_json = tiny_config_json(fields, LAYOUTS[1], vocab_size=261)
    assert check_architecture(config_json, MegatronKeys(uses_hf_config=True)) == []
    known = megatron_fields(config_json)
    # Groups of experts are limited where the model limits them.
    limited = (fields.get("topk_group") or 1) < (fields.get("n_group") or 1)
    assert bool(known.get("moe_router_num_groups")) == limited
    assert hf_fields(config_json)["rotary_base"] == fields["rotary_base"]


@pytest.mark.parametrize(
    ("stages", "pipeline", "layers", "by_stage"),
    [
        (StageShape(), 1, 2, [0, 0]),
        (StageShape(), 4, 4, [0, 1, 2, 3]),
        (StageShape(virtual=2), 2, 4, [0, 1, 0, 1]),
        (StageShape(last=13), 4, 7, [0, 0, 1, 1, 2, 2, 3]),
        (StageShape(first=1, last=1), 2, 2, [0, 1]),
        (StageShape(with_embedding=True, with_loss=True), 2, 2, [0, 1]),
    ],
)
def test_layers_fill_the_stages(stages: StageShape, pipeline: int, layers: int, by_stage: list[int]) -> None:
    found = tiny_config_json(model_fields("qwen3_4b"), replace(SIZES, pipeline=pipeline), vocab_size=261, stages=stages)
    assert found["num_hidden_layers"] == layers
    uneven = replace(stages, first=stages.first and 1, last=stages.last and 1)
    assert uneven.stages_of_layers(layers, pipeline) == by_stage


def test_the_last_stage_of_deepseek_has_its_13_layers() -> None:
    stages = StageShape(last=13).stages_of_layers(61, 4)
    assert [stages.count(stage) for stage in range(4)] == [16, 16, 16, 13]
