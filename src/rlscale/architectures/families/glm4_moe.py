"""GLM-4.5 with experts. Trained with FSDP2, served by SGLang."""

from rlscale.architectures.family import Family

FAMILY = Family(name="glm4_moe", sglang_unties=True)
