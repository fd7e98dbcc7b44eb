"""Qwen3-Next: three of four layers have linear attention (a gated delta net), and most have experts."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

FAMILY = Family(
    name="qwen3_next",
    implied={"use_qk_norm": True, "num_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": True},
    gated_shared_expert=True,
    delta_net=True,
    rotary_fraction=0.25,
    unused_prefixes=("mtp.",),
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV_GATED, weights.OUTPUT, weights.QUERY_NORM, weights.KEY_NORM, weights.INPUT_NORM),
        linear_attention=weights.DELTA_BY_HEAD,
        dense=weights.GATED_MLP,
        router=(*weights.ROUTER, *weights.GATED_SHARED_EXPERT),
        expert=weights.EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    embedded=True,
)
