"""GLM-4.5 to 4.7: grouped-query attention, and DeepSeek-V3's experts. Some sizes have norms of queries and keys."""

from dataclasses import replace

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

FAMILY = Family(
    name="glm4_moe",
    sigmoid_experts=True,
    rotary_fraction=0.5,
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(
            weights.QKV,
            replace(weights.QKV_BIAS, only_with="attention_bias"),
            weights.OUTPUT,
            replace(weights.QUERY_NORM, only_with="qk_norm"),
            replace(weights.KEY_NORM, only_with="qk_norm"),
            weights.INPUT_NORM,
        ),
        dense=weights.GATED_MLP,
        router=(*weights.ROUTER, weights.EXPERT_BIAS, *weights.SHARED_EXPERTS),
        expert=weights.EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    mtp=weights.NEXTN,
    bridge="glm4_moe",
    embedded=True,
    sglang_unties=True,
)
