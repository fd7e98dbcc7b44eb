"""Qwen2 with experts and a shared one, which has a gate. Served by SGLang."""

from dataclasses import replace

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

_QKV_BIAS = replace(weights.QKV_BIAS, only_with="attention_bias")

FAMILY = Family(
    name="qwen2_moe",
    # The bias unless `qkv_bias` is false.
    implied={"attention_bias": True, "num_shared_experts": 0, "first_k_dense_replace": 0},
    gated_shared_expert=True,
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, _QKV_BIAS, weights.OUTPUT, weights.INPUT_NORM),
        dense=weights.GATED_MLP,
        router=(*weights.ROUTER, *weights.GATED_SHARED_EXPERT),
        expert=weights.EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    bridge="qwen2_moe",
    chunked_logits=True,
)
