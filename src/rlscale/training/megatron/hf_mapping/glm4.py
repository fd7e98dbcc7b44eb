"""GLM-4: gate and other matrix are one tensor, and what attention and MLP give is normalised, too."""

from rlscale.training.megatron.hf_mapping import decoder
from rlscale.training.megatron.hf_mapping.decoder import HF, MEGATRON
from rlscale.training.megatron.hf_mapping.mapping import Layout, Names, Weight

GATE_UP = Weight(
    megatron=f"{MEGATRON}.mlp.linear_fc1.weight", hf=(f"{HF}.mlp.gate_up_proj.weight",), layout=Layout.gated_fused
)
ATTENTION_NORM = Weight(
    megatron=f"{MEGATRON}.self_attention.linear_proj.post_layernorm.weight",
    hf=(f"{HF}.post_self_attn_layernorm.weight",),
)
POST_MLP_NORM = Weight(
    megatron=f"{MEGATRON}.mlp.linear_fc2.post_layernorm.weight", hf=(f"{HF}.post_mlp_layernorm.weight",)
)

NAMES = Names(
    before=(decoder.EMBEDDING,),
    attention=(decoder.QKV, decoder.QKV_BIAS, decoder.OUTPUT, decoder.INPUT_NORM),
    dense=(GATE_UP, decoder.DOWN, decoder.MLP_NORM),
    norms=(ATTENTION_NORM, POST_MLP_NORM),
    after=(decoder.FINAL_NORM, decoder.HEAD),
)
