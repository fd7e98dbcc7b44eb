"""Qwen3 with experts. The layers in `mlp_only_layers` are those of the dense model."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

FAMILY = Family(
    name="qwen3_moe",
    implied={"use_qk_norm": True, "num_shared_experts": 0, "first_k_dense_replace": 0},
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, weights.OUTPUT, weights.QUERY_NORM, weights.KEY_NORM, weights.INPUT_NORM),
        dense=weights.GATED_MLP,
        router=weights.ROUTER,
        expert=weights.EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    bridge="qwen3_moe",
    embedded=True,
    sglang_unties=True,
    chunked_logits=True,
)
