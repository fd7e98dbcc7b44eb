"""Parameters, cache and operations of an architecture, compared with the models of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.hf_config import hf_fields, read_hf_fields
from rlscale.config import ModelBuild, ModelConfig
from rlscale.errors import ConfigError
from rlscale.plan.model_size import policy_architecture, reference_architecture

SMALL: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16},
    "llama": {"num_key_value_heads": 4},
    "glm4": {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
    },
}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 111,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def saved_architecture(model_type: str, folder: Path, **fields: Any) -> Architecture:
    """The architecture of a config.json that transformers writes."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **{**COMMON, **fields}).save_pretrained(folder)
    return policy_architecture(ModelConfig(hf_checkpoint=str(folder)))


@pytest.mark.parametrize("model_type", SMALL)
def test_every_family_has_the_parameters_of_transformers(model_type: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    a = saved_architecture(model_type, tmp_path, **SMALL[model_type])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert a.parameters == sum(p.numel() for p in model.parameters())
    layers = dict.fromkeys(range(4), 0)
    for name, parameter in model.named_parameters():
        if ".layers." in name:
            layers[int(name.split(".layers.")[1].split(".")[0])] += parameter.numel()
    assert [a.layer_parameters(layer) for layer in layers] == list(layers.values())


def test_active_parameters_exclude_idle_experts(tmp_path: Path) -> None:
    a = saved_architecture("deepseek_v3", tmp_path, **SMALL["deepseek_v3"])
    assert a.parameters - a.active_parameters == 2 * 6 * 3 * 64 * 20  # layers, idle experts, matrices
    dense = saved_architecture("llama", tmp_path)
    assert dense.active_parameters == dense.parameters


def test_a_cached_token_is_keys_and_values_of_every_layer(tmp_path: Path) -> None:
    grouped = saved_architecture("qwen3", tmp_path, **SMALL["qwen3"])
    assert grouped.cache_bytes_per_token(dtype_bytes=2) == 2 * 4 * 2 * 24 * 2
    assert grouped.cache_bytes_per_token(dtype_bytes=2, ranks=2) == 4 * 2 * 24 * 2
    assert grouped.cache_bytes_per_token(dtype_bytes=2, ranks=4) == 4 * 2 * 24 * 2  # a head is not cut
    latent = saved_architecture("deepseek_v3", tmp_path, **SMALL["deepseek_v3"])
    assert latent.cache_bytes_per_token(dtype_bytes=2, ranks=4) == 4 * (12 + 6) * 2


def test_operations_are_two_for_each_weight_and_four_for_each_pair_of_head_widths(tmp_path: Path) -> None:
    a = saved_architecture("llama", tmp_path)
    table, layers = 111 * 64, a.parameters - a.root_parameters
    assert a.forward_flops(tokens=10, context=0, logit_rows=3) == 10 * 2 * layers + 3 * 2 * table
    more = a.forward_flops(tokens=10, context=7, logit_rows=3) - a.forward_flops(tokens=10, context=0, logit_rows=3)
    assert more == 10 * 4 * 4 * 4 * 16 * 7  # tokens, two products of two operations, layers, heads, width, context


def test_the_config_overrides_the_checkpoint(tmp_path: Path) -> None:
    saved_architecture("qwen3", tmp_path)
    model = ModelConfig(hf_checkpoint=str(tmp_path), num_layers=7)
    assert policy_architecture(model).num_layers == 7


def test_a_hub_id_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    saved_architecture("qwen3", tmp_path / "models--someone--model" / "snapshots" / "abc")
    assert policy_architecture(ModelConfig(hf_checkpoint="someone/model")).vocab_size == 111


def test_every_missing_field_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        policy_architecture(ModelConfig(hf_checkpoint="someone/unknown", hidden_size=64))
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["model.num_layers", "model.num_attention_heads", "model.vocab_size"]


def test_a_reference_may_have_another_architecture(tmp_path: Path) -> None:
    policy = saved_architecture("qwen3", tmp_path / "policy")
    saved_architecture("qwen3", tmp_path / "reference", num_hidden_layers=2)
    model = ModelConfig(ref_load=str(tmp_path / "reference"))
    assert reference_architecture(model, policy).num_layers == 2
    assert reference_architecture(replace(model, ref_load=str(tmp_path / "nowhere")), policy) == policy


def test_a_config_json_without_an_object_gives_no_fields(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert read_hf_fields(str(tmp_path)) == {}


@pytest.mark.parametrize("build", list(ModelBuild))
def test_a_tiny_model_has_the_planned_parameters(build: ModelBuild, tmp_path: Path) -> None:
    import torch

    from rlscale.models.hf_models import load_causal_lm
    from rlscale.models.resolve_model import resolve_model

    config = ModelConfig(build=build, cache_dir=str(tmp_path))
    model = load_causal_lm(resolve_model(config), dtype=torch.float32)
    assert policy_architecture(config).parameters == sum(p.numel() for p in model.parameters())


def test_fields_of_a_config_json_have_the_keys_of_the_group(tmp_path: Path) -> None:
    a = saved_architecture("glm4_moe", tmp_path, **SMALL["glm4_moe"])
    fields = hf_fields(json.loads((tmp_path / "config.json").read_text()))
    assert (a.num_experts, a.num_shared_experts, a.num_dense_layers) == (6, 1, 1)
    assert fields["first_k_dense_replace"] == 1
