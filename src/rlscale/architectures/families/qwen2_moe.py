"""Qwen2 with experts. Trained with FSDP2, served by SGLang."""

from rlscale.architectures.family import Family

FAMILY = Family(name="qwen2_moe", chunked_logits=True)
