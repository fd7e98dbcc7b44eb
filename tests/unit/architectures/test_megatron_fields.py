"""TransformerConfig fields from a config.json, and problems of keys that contradict it."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from rlscale.architectures.delta_fields import delta_fields
from rlscale.architectures.family import names_with
from rlscale.architectures.hf_config import tiny_config_json
from rlscale.architectures.megatron_fields import (
    MEGATRON_DEFAULTS,
    MegatronKeys,
    check_architecture,
    check_bridge,
    megatron_fields,
    read_rope_type,
    transformer_fields,
)
from rlscale.config import MegatronConfig, ModelConfig
from rlscale.config.groups.megatron import RopeType
from rlscale.config.groups.model import MegatronToHf
from rlscale.config.load import load_config
from rlscale.config.rules.model import megatron_keys
from tests.unit.config.config_errors import config_errors

QWEN3: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "qwen3" / "config.json").read_text())
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


QWEN3_NEXT: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/qwen3_next/config.json").read_text())


def problems_of(config_json: dict[str, Any], *, megatron: MegatronConfig | None = None, **model: Any) -> list[str]:
    keys = ModelConfig(**{"use_hf_config_for_megatron": True, **model})
    return [str(each) for each in check_architecture(config_json, megatron_keys(keys, megatron or MegatronConfig()))]


def test_defaults_are_those_of_megatron_core() -> None:
    defaults = {field.name: field.default for field in fields(TransformerConfig)}
    assert {name: defaults[name] for name in MEGATRON_DEFAULTS} == MEGATRON_DEFAULTS


def test_keys_that_agree_are_accepted() -> None:
    given = MegatronConfig(core_args=megatron_fields(QWEN3))
    assert problems_of(QWEN3) == []
    assert problems_of(QWEN3, megatron=given, num_layers=2, rotary_base=10_000, use_hf_config_for_megatron=False) == []


def test_every_contradiction_is_reported_at_once() -> None:
    megatron = MegatronConfig(core_args={"layernorm_epsilon": 1e-5, "qk_layernorm": False}, rope_type=RopeType.yarn)
    assert problems_of(QWEN3, megatron=megatron, hidden_size=64, tie_word_embeddings=False) == [
        "model.hidden_size must be 32, as in config.json, got 64; remove it",
        "model.tie_word_embeddings must be true, as in config.json, got false; remove it",
        "megatron.layernorm_epsilon must be 1e-06, as in config.json, got 1e-05; remove it",
        "megatron.qk_layernorm must be true, as in config.json, got false; remove it",
        "megatron.rope_type must be rope, as in config.json, got yarn; set it to rope",
    ]


def test_fields_that_differ_from_megatron_core_must_be_set() -> None:
    (problem,) = problems_of(QWEN3, use_hf_config_for_megatron=False)
    assert problem.startswith("model.use_hf_config_for_megatron must be true where megatron leaves fields unset")
    assert problem.endswith(
        "set it to true, or add megatron.normalization=RMSNorm megatron.layernorm_epsilon=1e-06 "
        "megatron.gated_linear_unit=true megatron.add_bias_linear=false megatron.qk_layernorm=true "
        "megatron.hidden_dropout=0.0 megatron.attention_dropout=0.0"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"model_type": "glm_moe_dsa"},
            "model.model_type must be one of deepseek_v3, glm4, glm4_moe, glm4_moe_lite, gpt_oss, kimi_k2, llama, "
            "mimo, minimax_m2, mistral, mixtral, qwen2, qwen2_5_vl, qwen2_moe, qwen3, qwen3_5, qwen3_5_moe, "
            "qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, qwen3_vl",
        ),
        ({"model_type": "mistral", "sliding_window": 4096}, "must have sliding_window=null in its config.json"),
        ({"hidden_act": "gelu"}, "model.hf_checkpoint must have hidden_act=silu in its config.json with Megatron-core"),
        ({"use_sliding_window": True}, "must have use_sliding_window=false in its config.json"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "must have rope_type=default or linear or llama3 or"),
    ],
)
def test_unsupported_layers_are_refused(changes: dict[str, Any], problem: str) -> None:
    (found,) = problems_of({**QWEN3, **changes})
    assert problem in found
    assert found.endswith("train it with train=fsdp")


def test_expert_fields_follow_the_config() -> None:
    assert megatron_fields(MOE)["moe_router_pre_softmax"] is False
    assert megatron_fields({**MOE, "norm_topk_prob": False})["moe_router_pre_softmax"] is True
    assert megatron_fields(MOE)["moe_layer_freq"] == 1
    assert megatron_fields({**MOE, "mlp_only_layers": [0]})["moe_layer_freq"] == [0, 1]
    assert megatron_fields({**MOE, "decoder_sparse_step": 2})["moe_layer_freq"] == [0, 1]


LATENT: dict[str, Any] = {
    **{name: value for name, value in QWEN3.items() if name != "head_dim"},
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("config_json", "problem"),
    [
        ({**LATENT, "num_nextn_predict_layers": 1}, None),
        (LATENT, "must be null, as num_nextn_predict_layers in config.json, got 1; remove it"),
        ({**LATENT, "num_nextn_predict_layers": 2}, "must be 2, as num_nextn_predict_layers in config.json, got 1"),
        (QWEN3, "must be null for a qwen3 model, got 1; remove it; models of deepseek_v3,"),
    ],
)
def test_layers_for_multi_token_prediction_are_those_of_the_checkpoint(
    config_json: dict[str, Any], problem: str | None
) -> None:
    found = problems_of(config_json, megatron=MegatronConfig(core_args={"mtp_num_layers": 1}))
    assert len(found) == (problem is not None)
    assert problem is None or f"megatron.mtp_num_layers {problem}" in found[0]


def test_mla_fields_follow_the_config() -> None:
    assert problems_of(LATENT) == problems_of({**LATENT, "model_type": "kimi_k2"}) == []
    found = megatron_fields(LATENT)
    assert found["multi_latent_attention"] and found["moe_router_enable_expert_bias"]
    assert found["moe_layer_freq"] == [0, 1] and found["moe_router_score_function"] == "sigmoid"
    assert found["moe_shared_expert_intermediate_size"] == 32 and found["moe_router_topk_scaling_factor"] == 2.5
    assert (found["moe_router_num_groups"], found["moe_router_group_topk"]) == (4, 2)
    free = megatron_fields({**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0})
    assert free["moe_router_num_groups"] is free["moe_router_group_topk"] is None and free["moe_layer_freq"] == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_interleave": False}, "have rope_interleave=true in its config.json with Megatron-core, got false"),
        ({"attention_bias": True}, "have attention_bias=false in its config.json with Megatron-core, got true"),
        ({"norm_topk_prob": False}, "have norm_topk_prob=true in its config.json with Megatron-core, got false"),
        ({"scoring_func": "softmax"}, "have scoring_func=sigmoid in its config.json with Megatron-core, got softmax"),
        ({"topk_method": "greedy"}, "have topk_method=noaux_tc in its config.json with Megatron-core, got greedy"),
        ({"n_shared_experts": 0}, "have n_shared_experts of at least 1 in its config.json with Megatron-core, got 0"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok=4, with Megatron-core, got 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "use a copy with bfloat16 weights"),
    ],
)
def test_unsupported_mla_layers_are_refused(changes: dict[str, Any], problem: str) -> None:
    (found,) = problems_of({**LATENT, **changes})
    assert found.startswith("model.hf_checkpoint must ") and problem in found


GPT_OSS: dict[str, Any] = {
    **QWEN3,
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "swiglu_limit": 7.0,
}


def test_sink_fields_follow_the_config() -> None:
    assert problems_of(GPT_OSS) == []
    found = megatron_fields(GPT_OSS)
    assert (found["window_size"], found["window_attn_skip_freq"]) == ([127, 0], [1, 0])
    assert found["softmax_type"] == "learnable" and found["add_bias_linear"] and not found["moe_router_pre_softmax"]
    assert (found["activation_func_clamp_value"], found["glu_linear_offset"]) == (7.0, 1.0)
    # Published files list the layers; the default of transformers is the same.
    assert megatron_fields({**GPT_OSS, "layer_types": None}) == found
    full = megatron_fields({**GPT_OSS, "layer_types": ["full_attention"] * 2})
    assert full["window_size"] is full["window_attn_skip_freq"] is None
    other = problems_of(QWEN3, megatron=MegatronConfig(core_args={"window_size": [127, 0]}))
    assert other == ["megatron.window_size must be null, as in config.json, got [127, 0]; remove it"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": False}, "have attention_bias=true in its config.json with Megatron-core, got false"),
        ({"swiglu_alpha": 1.5}, "have swiglu_alpha=1.702 in its config.json with Megatron-core, got 1.5"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "with Megatron-core, got chunked_attention"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "got mxfp4; use a copy with bfloat16 weights"),
    ],
)
def test_unsupported_layers_with_sinks_are_refused(changes: dict[str, Any], problem: str) -> None:
    (found,) = problems_of({**GPT_OSS, **changes})
    assert found.startswith("model.hf_checkpoint must ") and problem in found


def test_a_tiny_model_uses_its_hf_config() -> None:
    assert load_config(["experiment=quickstart", "train=megatron"]).model.use_hf_config_for_megatron
    assert not load_config(["experiment=quickstart"]).model.use_hf_config_for_megatron


POSITIONS = "megatron.max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_position_embeddings": 32}, []),  # what YaRN started from
        ({"max_position_embeddings": 128, "rope_type": RopeType.yarn}, []),
        ({"max_position_embeddings": 64}, [f"{POSITIONS} must be 128, as in config.json, got 64"]),
    ],
)
def test_positions_of_a_yarn_model(given: dict[str, Any], expected: list[str]) -> None:
    model = ModelConfig(use_hf_config_for_megatron=True)
    config = {**QWEN3, "rope_parameters": YARN, "max_position_embeddings": 128}
    found = [str(each) for each in check_architecture(config, megatron_keys(model, MegatronConfig(**given)))]
    assert [each.split(";")[0] for each in found] == expected


def test_a_yarn_model_is_reported_without_use_hf_config() -> None:
    config = {**QWEN3, "rope_parameters": {**YARN, "attention_factor": 0.5}, "max_position_embeddings": 128}
    found = [str(each) for each in check_architecture(config, megatron_keys(ModelConfig(), MegatronConfig()))]
    assert "megatron.rope_type must be yarn, as in config.json, got rope; set it to yarn" in found
    assert any("must have no attention_factor below 1" in each for each in found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({**MOE}, []),
        ({**MOE, "mlp_only_layers": [0]}, []),
        ({"model_type": "glm4"}, [f"be raw for a glm4 model; mbridge converts {', '.join(names_with('bridge'))}"]),
    ],
)
def test_models_that_mbridge_does_not_convert_are_refused(changes: dict[str, Any], expected: list[str]) -> None:
    model = ModelConfig(use_hf_config_for_megatron=True, megatron_to_hf_mode=MegatronToHf.bridge)
    found = check_architecture({**QWEN3, **changes}, megatron_keys(model, MegatronConfig()))
    assert [each.rule for each in found] == expected
    assert all(each.path == "model.megatron_to_hf_mode" for each in found)


def test_layers_for_multi_token_prediction_need_the_names_of_rlscale() -> None:
    keys = MegatronKeys(uses_bridge=True, core_args={"mtp_num_layers": 1})
    (problem,) = check_bridge("mimo", keys)
    assert str(problem) == (
        "model.megatron_to_hf_mode must be raw with megatron.mtp_num_layers, whose layers mbridge does not convert, "
        "got bridge; remove it"
    )
    assert not check_bridge("mimo", MegatronKeys(uses_bridge=True))


@pytest.fixture
def stretched(tmp_path: Path) -> str:
    """A folder with the config.json of a Qwen3 whose positions are stretched by YaRN."""
    config = {**QWEN3, "rope_parameters": YARN, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"model.hf_checkpoint={tmp_path}"


FROM_HF = ["model=hf", "train=megatron", "model.use_hf_config_for_megatron=true", "debug.train_only=true"]
REPLAYED = "debug.load_rollout_data='{rollout_id}.jsonl'"


def test_a_wrong_rope_type_is_reported_with_all_other_contradictions(stretched: str) -> None:
    words = [*FROM_HF, REPLAYED, stretched, "megatron.rope_type=rope", "model.num_layers=3"]
    found = [each.split(";")[0].split(" (")[0] for each in config_errors(*words)]
    assert found == [
        "model.num_layers must be 2, as in config.json, got 3",
        "megatron.rope_type must be yarn, as in config.json, got rope",
    ]


@pytest.mark.parametrize("given", [[], ["megatron.rope_type=yarn"]])
def test_an_unset_rope_type_is_that_of_the_model(given: list[str], stretched: str) -> None:
    found = load_config([*FROM_HF, REPLAYED, stretched, *given])
    assert found.megatron.rope_type == RopeType.yarn
    with_fsdp = load_config(["model=hf", "debug.train_only=true", REPLAYED, stretched, "megatron.rope_type=rope"])
    assert with_fsdp.megatron.rope_type == RopeType.rope  # which does without it


@pytest.mark.parametrize(
    ("name", "given"),
    [("moe_layer_freq", [1, 1]), ("moe_router_num_groups", 1), ("moe_router_group_topk", 1)],
)
def test_values_of_the_same_meaning_are_accepted(name: str, given: object) -> None:
    megatron = MegatronConfig(core_args={name: given})
    config_json = {**MOE, "num_hidden_layers": 2}
    assert [text for text in problems_of(config_json, megatron=megatron) if text.startswith(f"megatron.{name}")] == []


def test_a_list_with_dense_layers_is_not_one() -> None:
    found = problems_of(MOE, megatron=MegatronConfig(core_args={"moe_layer_freq": [0, 1]}))
    assert found == ["megatron.moe_layer_freq must be 1, as in config.json, got [0, 1]; remove it"]


def test_sigmoid_routing_has_no_softmax_to_place() -> None:
    config_json = tiny_config_json("tiny_deepseek_v3", {})
    for value in (True, False):
        megatron = MegatronConfig(core_args={"moe_router_pre_softmax": value})
        assert problems_of(config_json, megatron=megatron) == []
    softmax = problems_of(MOE, megatron=MegatronConfig(core_args={"moe_router_pre_softmax": True}))
    assert softmax == ["megatron.moe_router_pre_softmax must be false, as in config.json, got true; remove it"]


def test_the_decoder_of_a_model_with_images_is_that_of_its_family() -> None:
    replaced = ("model_type", "rope_parameters", "attention_bias")
    plain = {name: value for name, value in QWEN3.items() if name not in replaced}
    rotary = {"type": "mrope", "mrope_section": [2, 3, 3]}
    # Published files of Qwen2.5-VL have the fields of the decoder at the top, those of Qwen3-VL in an object.
    flat = {**plain, "model_type": "qwen2_5_vl", "rope_scaling": rotary, "vision_config": {"hidden_act": "gelu"}}
    text = {**plain, "rope_scaling": {**rotary, "type": "default"}, "rms_norm_eps": 1e-5}
    nested = {"model_type": "qwen3_vl", "text_config": text}
    for config_json in (flat, nested):
        assert problems_of(config_json) == []
        assert read_rope_type(config_json) == "rope"
    assert megatron_fields(nested)["layernorm_epsilon"] == 1e-5 and megatron_fields(nested)["qk_layernorm"]
    assert megatron_fields(flat)["add_qkv_bias"] and not megatron_fields(nested)["add_qkv_bias"]
    (found,) = problems_of({**nested, "text_config": {**text, "hidden_act": "gelu"}})
    assert "must have hidden_act=silu" in found


def test_layers_with_linear_attention_and_gates() -> None:
    assert delta_fields(QWEN3_NEXT) == {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1, 0, 1, 0],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "moe_shared_expert_gate": True,
    }
    assert megatron_fields(QWEN3_NEXT)["moe_shared_expert_intermediate_size"] == 24
    assert problems_of(QWEN3_NEXT) == []
    # transformers 5 writes the kind of each layer, and Qwen3.5 has its decoder in an object.
    kinds = ["full_attention", "linear_attention"]
    text = {**QWEN3_NEXT, "model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": kinds, "num_experts": 0}
    published = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"hidden_size": 8}}
    assert transformer_fields(published)["linear_attention_freq"] == [0, 1]
    assert transformer_fields(QWEN3).keys() == megatron_fields(QWEN3).keys()


def test_layers_that_no_code_has_are_reported() -> None:
    megatron = MegatronConfig(core_args={"linear_num_key_heads": 4})
    assert problems_of({**QWEN3_NEXT, "attention_bias": True}, megatron=megatron) == [
        "model.hf_checkpoint must have attention_bias=false in its config.json with Megatron-core, got true; train it "
        "with train=fsdp",
        "megatron.linear_num_key_heads must be 2, as in config.json, got 4; remove it",
    ]
    (problem,) = problems_of({**QWEN3_NEXT, "layer_types": ["full_attention", "sliding_attention"] * 2})
    assert (
        "must have layer_types=full_attention in its config.json with Megatron-core, got sliding_attention" in problem
    )
