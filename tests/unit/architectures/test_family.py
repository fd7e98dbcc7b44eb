"""Model families: the table, and a new family that is added with one file."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.architectures import families
from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import Family, find_family, load_families, names_with
from rlscale.architectures.hf_config import hf_fields
from rlscale.architectures.megatron_fields import MegatronKeys, check_architecture, megatron_fields
from rlscale.config import RunConfig, load_config_with_notes
from rlscale.errors import ConfigError
from rlscale.models.decoder_config import DecoderConfig
from rlscale.plan import HARDWARE, make_plan
from rlscale.plan.activations import MicrobatchSpec, is_chunked, is_fused_layer
from rlscale.training.megatron.hf_mapping.mapping import map_weights

NEW_FAMILY = '''"""A family that is built of existing layers."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames, TensorLayout, Weight

GATE_UP = Weight(
    megatron="decoder.layers.{i}.mlp.linear_fc1.weight",
    hf=("model.layers.{i}.mlp.gate_and_up.weight",),
    layout=TensorLayout.gated_fused,
)
FAMILY = Family(
    name="llama_next",
    implied={"use_qk_norm": True, "attention_bias": False},
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, weights.OUTPUT, weights.QUERY_NORM, weights.KEY_NORM, weights.INPUT_NORM),
        dense=(GATE_UP, weights.DOWN, weights.MLP_NORM),
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    megatron_fields={"rotary_interleaved": True},
    fused_cpu=True,
    chunked_logits=True,
    embedded=EMBEDDED,
)
'''
CONFIG_JSON: Mapping[str, Any] = {
    "model_type": "llama_next",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
    "max_position_embeddings": 2048,
}
OVERRIDES = ["model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.vocab_size=5000"]


def add_family(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places a module next to those of the package `families`, where `load_families` lists it."""
    (folder / "llama_next.py").write_text(text)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    load_families.cache_clear()


@pytest.fixture(params=[True, False], ids=["embedded", "not embedded"])
def embedded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Adds `llama_next`; the value is whether the embedded engine runs it."""
    add_family(NEW_FAMILY.replace("EMBEDDED", str(request.param)), tmp_path, monkeypatch)
    yield request.param
    monkeypatch.undo()
    sys.modules.pop("rlscale.architectures.families.llama_next", None)
    load_families.cache_clear()


def load(*overrides: str) -> RunConfig:
    words = ["model=hf", "model.hf_checkpoint=someone/next", "model.model_type=llama_next", *OVERRIDES, *overrides]
    return load_config_with_notes([*words, "model.warmup_experiment=null"], to_run=False).config


def test_the_table_lists_every_module_of_the_package() -> None:
    folder = Path(families.__path__[0])
    assert list(load_families()) == sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    assert all(name == family.name for name, family in load_families().items())


def test_an_unknown_family_has_no_support() -> None:
    assert find_family("wonder") == Family(name="wonder")
    assert not find_family(None).embedded


def test_bridge_is_a_subset_of_what_megatron_core_trains() -> None:
    assert set(names_with("bridge")) < set(names_with("megatron"))


def test_config_rules_know_a_family_of_one_file(embedded: bool) -> None:
    if embedded:
        assert load("rollout=embedded").model.model_type == "llama_next"
        return
    with pytest.raises(ConfigError) as caught:
        load("rollout=embedded")
    assert "rollout.engine must be sglang or external with model.model_type=llama_next" in str(caught.value)


def test_the_plan_supports_a_family_of_one_file(embedded: bool) -> None:
    plan = make_plan(load("rollout=sglang"), HARDWARE["h100"])
    assert plan.model.qk_norm and plan.model.model_type == "llama_next"
    micro = MicrobatchSpec(tokens=8, logit_rows=4, sample_len=8, dtype_bytes=4, may_fuse=True)
    assert is_chunked(plan.model, micro) and is_fused_layer(plan.model, 0, micro)


def test_the_embedded_engine_supports_a_family_of_one_file(embedded: bool) -> None:
    if embedded:
        config = DecoderConfig.from_config_json(CONFIG_JSON)
        assert config.architecture == Architecture.from_config_json(CONFIG_JSON) and config.architecture.group_size == 2
        return
    with pytest.raises(ValueError, match=r"model_type must be one of .*, got llama_next; serve this model with SGLang"):
        DecoderConfig.from_config_json(CONFIG_JSON)


def test_megatron_core_supports_a_family_of_one_file(embedded: bool) -> None:
    assert hf_fields(CONFIG_JSON)["use_qk_norm"] is True
    assert check_architecture(CONFIG_JSON, MegatronKeys(uses_hf_config=True)) == []
    fields = megatron_fields(CONFIG_JSON)
    assert fields["qk_layernorm"] is True and fields["rotary_interleaved"] is True
    (problem,) = check_architecture(CONFIG_JSON, MegatronKeys(uses_hf_config=True, uses_bridge=True))
    assert problem.rule.startswith("be raw for a llama_next model")


def test_the_name_mapping_supports_a_family_of_one_file(embedded: bool) -> None:
    transformer = SimpleNamespace(
        multi_latent_attention=False,
        num_layers=2,
        num_moe_experts=None,
        moe_layer_freq=1,
        q_lora_rank=None,
        mtp_num_layers=None,
    )
    architecture: Any = SimpleNamespace(
        family="llama_next",
        transformer=transformer,
        is_tied=True,
        architecture=Architecture.from_config_json(CONFIG_JSON),
    )
    by_name = {mapped.weight.megatron: mapped.weight for mapped in map_weights(architecture)}
    assert by_name["decoder.layers.1.mlp.linear_fc1.weight"].hf == ("model.layers.1.mlp.gate_and_up.weight",)
    assert "output_layer.weight" not in by_name and len(by_name) == 2 + 2 * 8
