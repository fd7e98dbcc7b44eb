"""What the names of Llama-like families have in common."""

from rlscale.training.megatron.hf_mapping.mapping import Layout, Weight

MEGATRON, HF = "decoder.layers.{i}", "model.layers.{i}"

EMBEDDING = Weight(
    megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), layout=Layout.vocabulary
)
FINAL_NORM = Weight(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",))
HEAD = Weight(megatron="output_layer.weight", hf=("lm_head.weight",), layout=Layout.vocabulary)

QKV = Weight(
    megatron=f"{MEGATRON}.self_attention.linear_qkv.weight",
    hf=tuple(f"{HF}.self_attn.{each}_proj.weight" for each in "qkv"),
    layout=Layout.qkv,
)
QKV_BIAS = Weight(
    megatron=f"{MEGATRON}.self_attention.linear_qkv.bias",
    hf=tuple(f"{HF}.self_attn.{each}_proj.bias" for each in "qkv"),
    layout=Layout.qkv,
)
OUTPUT = Weight(
    megatron=f"{MEGATRON}.self_attention.linear_proj.weight",
    hf=(f"{HF}.self_attn.o_proj.weight",),
    layout=Layout.columns,
)
QUERY_NORM, KEY_NORM = (
    Weight(megatron=f"{MEGATRON}.self_attention.{each}_layernorm.weight", hf=(f"{HF}.self_attn.{each}_norm.weight",))
    for each in "qk"
)
INPUT_NORM = Weight(
    megatron=f"{MEGATRON}.self_attention.linear_qkv.layer_norm_weight", hf=(f"{HF}.input_layernorm.weight",)
)

GATE_UP = Weight(
    megatron=f"{MEGATRON}.mlp.linear_fc1.weight",
    hf=(f"{HF}.mlp.gate_proj.weight", f"{HF}.mlp.up_proj.weight"),
    layout=Layout.gated,
)
DOWN = Weight(megatron=f"{MEGATRON}.mlp.linear_fc2.weight", hf=(f"{HF}.mlp.down_proj.weight",), layout=Layout.columns)
MLP_NORM = Weight(
    megatron=f"{MEGATRON}.mlp.linear_fc1.layer_norm_weight", hf=(f"{HF}.post_attention_layernorm.weight",)
)
