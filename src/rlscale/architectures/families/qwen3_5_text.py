"""Qwen3.5 without its vision tower: Qwen3-Next's attention, with other tensors, and no experts."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

NAMES = HfNames(
    before=(weights.EMBEDDING,),
    attention=(weights.QKV_GATED, weights.OUTPUT, weights.QUERY_NORM, weights.KEY_NORM, weights.INPUT_NORM),
    linear_attention=weights.DELTA_BY_PART,
    dense=weights.GATED_MLP,
    after=(weights.FINAL_NORM, weights.HEAD),
)

FAMILY = Family(
    name="qwen3_5_text",
    implied={"use_qk_norm": True},
    delta_net=True,
    rotary_fraction=0.25,
    unused_prefixes=("model.visual.", "mtp."),
    hf_names=NAMES,
    embedded=True,
)
