"""Qwen2 with experts. Trained with FSDP2, served by SGLang."""

from rlscale.architectures.family import Family

FAMILY = Family(
    name="qwen2_moe",
    implied={"attention_bias": True},  # unless `qkv_bias` is false
    gated_shared_expert=True,
    chunked_logits=True,
)
