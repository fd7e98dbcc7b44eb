"""Qwen3, dense: queries and keys are normalised, no layer has a bias."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

NAMES = HfNames(
    before=(weights.EMBEDDING,),
    attention=(weights.QKV, weights.OUTPUT, weights.QUERY_NORM, weights.KEY_NORM, weights.INPUT_NORM),
    dense=weights.GATED_MLP,
    after=(weights.FINAL_NORM, weights.HEAD),
)

FAMILY = Family(
    name="qwen3",
    implied={"use_qk_norm": True},
    hf_names=NAMES,
    bridge="qwen3",
    embedded=True,
    fused_cpu=True,
    chunked_logits=True,
)
