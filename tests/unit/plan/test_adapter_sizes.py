"""Sizes of adapters in a plan are those of the adapters that peft makes."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlscale.architectures.hf_config import TINY_VISION
from rlscale.config import LoraConfig, ModelBuild, ModelConfig, TrainConfig
from rlscale.models.resolve_model import resolve_model
from rlscale.plan.adapter_sizes import AdapterSpec
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.model_size import policy_architecture
from rlscale.training.modules.lora import add_adapters, find_adapters
from tests.tiny_model import write_tiny

CASES: list[tuple[str, list[str] | None]] = [
    *((build, None) for build in ("tiny_qwen3", "tiny_qwen3_moe", "tiny_deepseek_v3", *TINY_VISION)),
    ("tiny_qwen3", ["q_proj", "down_proj"]),
    ("tiny_qwen3_vl", ["o_proj", "linear_fc1", "v_proj"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "targets"), CASES)
def test_sizes_are_those_of_peft(build: str, targets: list[str] | None, tmp_path: Path) -> None:
    config = ModelConfig(build=ModelBuild(build), cache_dir=str(tmp_path))
    kind = AutoModelForImageTextToText if build in TINY_VISION else AutoModelForCausalLM
    model = kind.from_pretrained(resolve_model(config))
    lora = LoraConfig(rank=2, target_modules=targets)
    add_adapters(model, lora, seed=0)
    made = sum(each.a.numel() + each.b.numel() for each in find_adapters(model).values())
    found = AdapterSpec.from_config(TrainConfig(lora=lora))
    assert found.elements(policy_architecture(config)) == made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_sizes_with_linear_attention_are_those_of_peft(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family=family)
    model, lora = AutoModelForCausalLM.from_pretrained(folder), LoraConfig(rank=2)
    add_adapters(model, lora, seed=0)
    made = sum(each.a.numel() + each.b.numel() for each in find_adapters(model).values())
    a = policy_architecture(ModelConfig(hf_checkpoint=str(folder)))
    assert AdapterSpec.from_config(TrainConfig(lora=lora)).elements(a) == made


def test_a_stage_has_those_of_its_layers() -> None:
    a = policy_architecture(ModelConfig(build=ModelBuild.tiny_qwen3))
    found = AdapterSpec(rank=4, targets=("q_proj", "o_proj"))
    parallel = ParallelSizes(tensor=2, pipeline=2, context=1, expert=1, data=1, expert_tensor=1)
    # 2 of 4 layers: A of queries and B of outputs are whole, 128 wide.
    assert found.stage_elements(a, parallel) == 2 * 4 * (128 + 128 / 2 + 128 / 2 + 128)
    assert AdapterSpec().elements(a) == 0


def test_the_first_stage_has_those_of_the_whole_tower() -> None:
    a = policy_architecture(ModelConfig(build=ModelBuild.tiny_qwen3_vl))
    assert a.tower is not None
    parallel = ParallelSizes(tensor=2, pipeline=2, context=1, expert=1, data=1, expert_tensor=1)
    found = AdapterSpec(rank=2, targets=("linear_fc2",)).stage_elements(a, parallel)
    # The projector and those of deepstack, and the MLP of each block.
    mergers = (1 + a.tower.num_deepstack) * (a.tower.merged_width + a.tower.out_size)
    blocks = a.tower.depth * (a.tower.intermediate_size + a.tower.hidden_size)
    assert found == 2 * (mergers + blocks)
