"""Mixtral: Mistral with experts. Trained with FSDP2, served by SGLang."""

from rlscale.architectures.family import Family

FAMILY = Family(name="mixtral", chunked_logits=True)
