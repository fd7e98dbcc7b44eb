"""Qwen3.5 with experts, without its vision tower: every layer has experts and a shared one."""

from dataclasses import replace

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.families import qwen3_5_text

NAMES = replace(
    qwen3_5_text.NAMES, router=(*weights.ROUTER, *weights.GATED_SHARED_EXPERT), expert=weights.EXPERT, dense=()
)

FAMILY = replace(
    qwen3_5_text.FAMILY,
    name="qwen3_5_moe_text",
    implied={"use_qk_norm": True, "num_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": True},
    gated_shared_expert=True,
    hf_names=NAMES,
)
