"""Weights that Llama-like families share: the building blocks of their `HfNames`."""

from __future__ import annotations

from dataclasses import replace

from rlscale.architectures.weight_names import MtpNames, TensorLayout, Weight

MEGATRON_LAYER, HF_LAYER = "decoder.layers.{i}", "model.layers.{i}"
_ATTENTION, _HF_ATTENTION = f"{MEGATRON_LAYER}.self_attention", f"{HF_LAYER}.self_attn"
_EXPERT, _HF_EXPERT = f"{MEGATRON_LAYER}.mlp.experts.local_experts.{{j}}", f"{HF_LAYER}.mlp.experts.{{j}}"
_SHARED, _HF_SHARED = f"{MEGATRON_LAYER}.mlp.shared_experts", f"{HF_LAYER}.mlp.shared_experts"
_HF_GATED_SHARED = f"{HF_LAYER}.mlp.shared_expert"
_HF_DELTA = f"{HF_LAYER}.linear_attn"

EMBEDDING = Weight(
    megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), layout=TensorLayout.vocabulary
)
FINAL_NORM = Weight(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",))
HEAD = Weight(megatron="output_layer.weight", hf=("lm_head.weight",), layout=TensorLayout.vocabulary)

# Megatron-core keeps queries, keys and values in one tensor, and the input norm inside the same layer.
QKV = Weight(
    megatron=f"{_ATTENTION}.linear_qkv.weight",
    hf=tuple(f"{_HF_ATTENTION}.{each}_proj.weight" for each in "qkv"),
    layout=TensorLayout.qkv,
)
QKV_BIAS = Weight(
    megatron=f"{_ATTENTION}.linear_qkv.bias",
    hf=tuple(f"{_HF_ATTENTION}.{each}_proj.bias" for each in "qkv"),
    layout=TensorLayout.qkv,
)
# A query head and its gate are neighbours in the tensor of the queries.
QKV_GATED = replace(QKV, layout=TensorLayout.qkv_gated)
OUTPUT = Weight(
    megatron=f"{_ATTENTION}.linear_proj.weight", hf=(f"{_HF_ATTENTION}.o_proj.weight",), layout=TensorLayout.columns
)
QUERY_NORM, KEY_NORM = (
    Weight(megatron=f"{_ATTENTION}.{each}_layernorm.weight", hf=(f"{_HF_ATTENTION}.{each}_norm.weight",))
    for each in "qk"
)
INPUT_NORM = Weight(megatron=f"{_ATTENTION}.linear_qkv.layer_norm_weight", hf=(f"{HF_LAYER}.input_layernorm.weight",))

GATE_UP = Weight(
    megatron=f"{MEGATRON_LAYER}.mlp.linear_fc1.weight",
    hf=(f"{HF_LAYER}.mlp.gate_proj.weight", f"{HF_LAYER}.mlp.up_proj.weight"),
    layout=TensorLayout.gated,
)
DOWN = Weight(
    megatron=f"{MEGATRON_LAYER}.mlp.linear_fc2.weight",
    hf=(f"{HF_LAYER}.mlp.down_proj.weight",),
    layout=TensorLayout.columns,
)
MLP_NORM = Weight(
    megatron=f"{MEGATRON_LAYER}.mlp.linear_fc1.layer_norm_weight", hf=(f"{HF_LAYER}.post_attention_layernorm.weight",)
)
GATED_MLP = (GATE_UP, DOWN, MLP_NORM)

ROUTER = (
    Weight(megatron=f"{MEGATRON_LAYER}.mlp.router.weight", hf=(f"{HF_LAYER}.mlp.gate.weight",)),
    Weight(megatron=f"{MEGATRON_LAYER}.pre_mlp_layernorm.weight", hf=(f"{HF_LAYER}.post_attention_layernorm.weight",)),
)
# A buffer on both sides, in float32 whatever the dtype of the weights is.
EXPERT_BIAS = Weight(
    megatron=f"{MEGATRON_LAYER}.mlp.router.expert_bias", hf=(f"{HF_LAYER}.mlp.gate.e_score_correction_bias",)
)
SHARED_EXPERTS = (
    Weight(
        megatron=f"{_SHARED}.linear_fc1.weight",
        hf=(f"{_HF_SHARED}.gate_proj.weight", f"{_HF_SHARED}.up_proj.weight"),
        layout=TensorLayout.gated,
    ),
    Weight(
        megatron=f"{_SHARED}.linear_fc2.weight", hf=(f"{_HF_SHARED}.down_proj.weight",), layout=TensorLayout.columns
    ),
)
# Of Qwen2-MoE and its successors: one shared expert, with a gate.
GATED_SHARED_EXPERT = (
    Weight(
        megatron=f"{_SHARED}.linear_fc1.weight",
        hf=(f"{_HF_GATED_SHARED}.gate_proj.weight", f"{_HF_GATED_SHARED}.up_proj.weight"),
        layout=TensorLayout.gated,
    ),
    Weight(
        megatron=f"{_SHARED}.linear_fc2.weight",
        hf=(f"{_HF_GATED_SHARED}.down_proj.weight",),
        layout=TensorLayout.columns,
    ),
    Weight(megatron=f"{_SHARED}.gate_weight", hf=(f"{_HF_GATED_SHARED}_gate.weight",)),
)
# Published checkpoints hold one tensor per matrix and expert; transformers stacks those of a layer in memory.
EXPERT = (
    Weight(
        megatron=f"{_EXPERT}.linear_fc1.weight",
        hf=(f"{_HF_EXPERT}.gate_proj.weight", f"{_HF_EXPERT}.up_proj.weight"),
        layout=TensorLayout.gated,
    ),
    Weight(
        megatron=f"{_EXPERT}.linear_fc2.weight", hf=(f"{_HF_EXPERT}.down_proj.weight",), layout=TensorLayout.columns
    ),
)

# Of Mixtral and its successors.
_HF_MIXTRAL = f"{HF_LAYER}.block_sparse_moe"
MIXTRAL_ROUTER = (
    Weight(megatron=f"{MEGATRON_LAYER}.mlp.router.weight", hf=(f"{_HF_MIXTRAL}.gate.weight",)),
    Weight(megatron=f"{MEGATRON_LAYER}.pre_mlp_layernorm.weight", hf=(f"{HF_LAYER}.post_attention_layernorm.weight",)),
)
MIXTRAL_EXPERT = (
    Weight(
        megatron=f"{_EXPERT}.linear_fc1.weight",
        hf=tuple(f"{_HF_MIXTRAL}.experts.{{j}}.{each}.weight" for each in ("w1", "w3")),
        layout=TensorLayout.gated,
    ),
    Weight(
        megatron=f"{_EXPERT}.linear_fc2.weight",
        hf=(f"{_HF_MIXTRAL}.experts.{{j}}.w2.weight",),
        layout=TensorLayout.columns,
    ),
)

# Of a gated delta net. Megatron-core keeps all projections of the input in one tensor, and the input norm with them.
_DELTA = (
    Weight(megatron=f"{_ATTENTION}.conv1d.weight", hf=(f"{_HF_DELTA}.conv1d.weight",), layout=TensorLayout.delta_conv),
    Weight(megatron=f"{_ATTENTION}.dt_bias", hf=(f"{_HF_DELTA}.dt_bias",), layout=TensorLayout.rows),
    Weight(megatron=f"{_ATTENTION}.A_log", hf=(f"{_HF_DELTA}.A_log",), layout=TensorLayout.rows),
    Weight(megatron=f"{_ATTENTION}.out_norm.weight", hf=(f"{_HF_DELTA}.norm.weight",)),
    Weight(megatron=f"{_ATTENTION}.out_proj.weight", hf=(f"{_HF_DELTA}.out_proj.weight",), layout=TensorLayout.columns),
    Weight(megatron=f"{_ATTENTION}.in_proj.layer_norm_weight", hf=(f"{HF_LAYER}.input_layernorm.weight",)),
)
DELTA_BY_HEAD = (
    Weight(
        megatron=f"{_ATTENTION}.in_proj.weight",
        hf=(f"{_HF_DELTA}.in_proj_qkvz.weight", f"{_HF_DELTA}.in_proj_ba.weight"),
        layout=TensorLayout.delta_heads,
    ),
    *_DELTA,
)
DELTA_BY_PART = (
    Weight(
        megatron=f"{_ATTENTION}.in_proj.weight",
        hf=tuple(f"{_HF_DELTA}.in_proj_{each}.weight" for each in ("qkv", "z", "b", "a")),
        layout=TensorLayout.delta_parts,
    ),
    *_DELTA,
)

# Checkpoints store them as further decoder layers, each with copies of embedding and output layer.
NEXTN = MtpNames(
    hf_layer=HF_LAYER,
    own=(
        Weight(megatron="enorm.weight", hf=("enorm.weight",)),
        Weight(megatron="hnorm.weight", hf=("hnorm.weight",)),
        Weight(megatron="eh_proj.weight", hf=("eh_proj.weight",), layout=TensorLayout.rows),
        Weight(megatron="final_layernorm.weight", hf=("shared_head.norm.weight",)),
    ),
    copies={"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"},
)
