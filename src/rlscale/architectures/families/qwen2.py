"""Qwen2 and Qwen2.5: queries, keys and values have a bias."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

NAMES = HfNames(
    before=(weights.EMBEDDING,),
    attention=(weights.QKV, weights.QKV_BIAS, weights.OUTPUT, weights.INPUT_NORM),
    dense=weights.GATED_MLP,
    after=(weights.FINAL_NORM, weights.HEAD),
)

FAMILY = Family(
    name="qwen2",
    implied={"attention_bias": True, "use_qk_norm": False},
    hf_names=NAMES,
    bridge="qwen2",
    embedded=True,
    fused_cpu=True,
    chunked_logits=True,
)
