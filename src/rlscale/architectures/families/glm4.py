"""GLM-4: gate and up projection are one tensor, and the outputs of attention and MLP are normalised."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.decoder_weights import HF_LAYER, MEGATRON_LAYER
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames, TensorLayout, Weight

_GATE_UP = Weight(
    megatron=f"{MEGATRON_LAYER}.mlp.linear_fc1.weight",
    hf=(f"{HF_LAYER}.mlp.gate_up_proj.weight",),
    layout=TensorLayout.gated_fused,
)
_POST_NORMS = (
    Weight(
        megatron=f"{MEGATRON_LAYER}.self_attention.linear_proj.post_layernorm.weight",
        hf=(f"{HF_LAYER}.post_self_attn_layernorm.weight",),
    ),
    Weight(
        megatron=f"{MEGATRON_LAYER}.mlp.linear_fc2.post_layernorm.weight",
        hf=(f"{HF_LAYER}.post_mlp_layernorm.weight",),
    ),
)

FAMILY = Family(
    name="glm4",
    implied={"use_qk_norm": False},
    rotary_fraction=0.5,
    post_norms=True,
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, weights.QKV_BIAS, weights.OUTPUT, weights.INPUT_NORM),
        dense=(_GATE_UP, weights.DOWN, weights.MLP_NORM),
        norms=_POST_NORMS,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    # RoPE rotates neighbouring pairs, not the two halves of a head.
    megatron_fields={"rotary_interleaved": True},
    embedded=True,
)
