"""Parameters, cache and operations of an architecture, compared with the models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.hf_config import hf_fields, read_hf_fields
from rlscale.config import ModelBuild, ModelConfig, load_config
from rlscale.errors import ConfigError
from rlscale.plan.frozen_parameters import list_parameters
from rlscale.plan.fsdp_memory import shard_elements
from rlscale.plan.model_size import list_architectures, policy_architecture

DELTA = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
SMALL: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
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
    "qwen3_next": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [1],
        **DELTA,
    },
    "qwen3_5_text": {**DELTA},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 2},
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


SMALLEST: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10}


def saved_architecture(model_type: str, folder: Path, **fields: Any) -> Architecture:
    """The architecture of a config.json that transformers writes."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **{**COMMON, **fields}).save_pretrained(folder)
    return policy_architecture(ModelConfig(hf_checkpoint=str(folder)))


MIXED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"mlp_only_layers": [1, 3]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}),
    ("qwen2_moe", {"mlp_only_layers": [2], "qkv_bias": False}),
]


@pytest.mark.parametrize(("model_type", "more"), [*((name, {}) for name in SMALL), *MIXED])
def test_every_family_has_the_parameters_of_transformers(model_type: str, more: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    a = saved_architecture(model_type, tmp_path, **SMALL[model_type], **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert a.parameters == sum(p.numel() for p in model.parameters())
    layers = dict.fromkeys(range(4), 0)
    for name, parameter in model.named_parameters():
        if ".layers." in name:
            layers[int(name.split(".layers.")[1].split(".")[0])] += parameter.numel()
    assert [a.layer_parameters(layer) for layer in layers] == list(layers.values())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if model_type in ("gpt_oss", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text"):
        assert {each.name: each.shape for each in list_parameters(a)} == shapes


def test_active_parameters_exclude_idle_experts(tmp_path: Path) -> None:
    a = saved_architecture("deepseek_v3", tmp_path, **SMALL["deepseek_v3"])
    assert a.parameters - a.active_parameters == 2 * 6 * 3 * 64 * 20  # layers, idle experts, matrices
    dense = saved_architecture("llama", tmp_path)
    assert dense.active_parameters == dense.parameters


def test_dense_layers_between_layers_with_experts_are_counted_apart(tmp_path: Path) -> None:
    a = saved_architecture("qwen3_moe", tmp_path, **SMALL["qwen3_moe"], mlp_only_layers=[1, 3])
    assert a.kinds == {0: 2, 1: 2} and a.count_kinds(1, 4) == {0: 1, 1: 2} and a.num_expert_layers == 2
    assert a.parameters - a.active_parameters == 2 * 4 * 3 * 64 * 20  # layers, idle experts, matrices
    # Both kinds in two blocks instead of in turns: the same shards.
    blocks = saved_architecture("qwen3_moe", tmp_path, **SMALL["qwen3_moe"], mlp_only_layers=[2, 3])
    assert shard_elements(a, 3) == shard_elements(blocks, 3)


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"model_type": "mistral", "sliding_window": 3}, 4),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "mixtral", "sliding_window": 3}, 4),
        ({"model_type": "qwen2", "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}, 3),
        ({"model_type": "qwen2", "sliding_window": 3, "use_sliding_window": False, "max_window_layers": 1}, 0),
        ({"model_type": "x", "sliding_window": 3, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}, 3),
    ],
)
def test_layers_with_a_window_attend_to_few_tokens(fields: dict[str, Any], number: int) -> None:
    cost = Architecture.from_config_json({**COMMON, **fields}).forward_cost
    assert [cost.count_pairs(length) for length in (2, 3, 9)] == [2, 4.5, (81 - number / 4 * 36) / 2]


def test_windows_of_transformers_are_counted(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    for family in ("qwen2", "qwen3"):
        a = saved_architecture(family, tmp_path, **SMALL[family], **window)
        assert (a.window, a.num_window_layers) == (8, 3)


def test_a_cached_token_is_keys_and_values_of_every_layer(tmp_path: Path) -> None:
    grouped = saved_architecture("qwen3", tmp_path, **SMALL["qwen3"])
    assert grouped.cache_bytes_per_token(dtype_bytes=2) == 2 * 4 * 2 * 24 * 2
    assert grouped.cache_bytes_per_token(dtype_bytes=2, ranks=2) == 4 * 2 * 24 * 2
    assert grouped.cache_bytes_per_token(dtype_bytes=2, ranks=4) == 4 * 2 * 24 * 2  # a head is not cut
    latent = saved_architecture("deepseek_v3", tmp_path, **SMALL["deepseek_v3"])
    assert latent.cache_bytes_per_token(dtype_bytes=2, ranks=4) == 4 * (12 + 6) * 2


def test_layers_with_linear_attention_have_no_cache_and_a_state(tmp_path: Path) -> None:
    a = saved_architecture("qwen3_next", tmp_path, **SMALL["qwen3_next"])
    assert (a.linear_layers, a.dense_layers) == ((0, 1, 2), (1,))
    # Of each kind the first layer, and how many there are.
    assert a.kinds == {0: 2, 1: 1, 3: 1} and a.count_kinds(1, 4) == {0: 1, 1: 1, 3: 1}
    assert a.cache_bytes_per_token(dtype_bytes=2) == 2 * 1 * 2 * 16 * 2
    # In three layers: three inputs of the convolution, and a matrix in float32 for each head.
    assert a.state_bytes(dtype_bytes=2) == 3 * (2 * 3 * (2 * 2 * 8 + 6 * 10) + 4 * 6 * 8 * 10)
    assert [a.state_index(layer) for layer in range(4)] == [0, 1, 2, 0]
    cost, layers = a.forward_cost, a.active_parameters - a.root_parameters
    assert cost.per_pair == 2 * 1 * 4 * 2 * 16
    # Three products with each element of the state, of six heads in three layers.
    assert cost.per_token == 2 * layers + 3 * 6 * 6 * 8 * 10


def test_operations_are_two_for_each_weight_and_four_for_each_pair_of_head_widths(tmp_path: Path) -> None:
    a = saved_architecture("llama", tmp_path)
    table, layers = 111 * 64, a.parameters - a.root_parameters
    assert a.forward_flops(tokens=10, context=0, logit_rows=3) == 10 * 2 * layers + 3 * 2 * table
    more = a.forward_flops(tokens=10, context=7, logit_rows=3) - a.forward_flops(tokens=10, context=0, logit_rows=3)
    assert more == 10 * 4 * 4 * 4 * 16 * 7  # tokens, two products of two operations, layers, heads, width, context


@pytest.mark.parametrize(
    ("model", "per_token", "per_pair"),
    [
        # Per layer: attention 8 * (12 + 6 + 6 + 12), MLP 3 * 8 * 16, norms 16. Two layers, two operations per weight.
        (Architecture(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=3, **SMALLEST), 2 * 2 * 688, 2 * 2 * 4 * 6),
        # One key head less: 2 * 8 * 3 weights less, and as much attention.
        (Architecture(num_layers=2, num_heads=4, num_kv_heads=1, head_dim=3, **SMALLEST), 2 * 2 * 640, 2 * 2 * 4 * 6),
        # Attention 8 * (8 + 4 + 4 + 8), router 8 * 4, 2 of 4 experts and a shared one 3 * 3 * 8 * 5, norms 16.
        (
            Architecture(
                num_layers=1,
                num_heads=2,
                num_kv_heads=1,
                head_dim=4,
                num_experts=4,
                experts_per_token=2,
                expert_size=5,
                num_shared_experts=1,
                **SMALLEST,
            ),
            2 * 600,
            2 * 2 * 8,
        ),
        # Queries 8 * 6 + 6 + 6 * 2 * 5, keys and values 8 * (4 + 2) + 4 + 4 * 2 * 8, output 8 * 10, MLP, norms.
        (
            Architecture(
                num_layers=1,
                num_heads=2,
                num_kv_heads=2,
                head_dim=4,
                q_rank=6,
                kv_rank=4,
                nope_dim=3,
                rope_dim=2,
                value_dim=5,
                **SMALLEST,
            ),
            2 * 710,
            2 * 2 * (5 + 5),
        ),
    ],
    ids=["grouped", "one_key_head", "experts", "latent"],
)
def test_the_cost_of_a_token_and_of_a_pair_by_hand(model: Architecture, per_token: int, per_pair: int) -> None:
    cost = model.forward_cost
    assert (cost.per_token, cost.per_pair, cost.per_logit_row) == (per_token, per_pair, 2 * 8 * 10)
    assert model.forward_flops(tokens=3, context=5, logit_rows=2) == 3 * (per_token + 5 * per_pair) + 2 * 160


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

    def layers(reference: str) -> dict[str, int]:
        config = load_config(
            ["algo.use_kl_loss=true", "algo.kl_loss_coef=0.1", f"model.ref_load={tmp_path / reference}"]
        )
        return {role: each.num_layers for role, each in list_architectures(config, policy).items()}

    assert layers("reference") == {"policy": policy.num_layers, "reference": 2}
    assert layers("nowhere") == {"policy": policy.num_layers, "reference": policy.num_layers}


def test_a_config_json_without_an_object_gives_no_fields(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert read_hf_fields(str(tmp_path)) == {}


@pytest.mark.slow
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
    assert (a.num_experts, a.num_shared_experts, a.dense_layers) == (6, 1, (0,))
    assert fields["first_k_dense_replace"] == 1
