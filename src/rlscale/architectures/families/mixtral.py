"""Mixtral: Mistral with experts. Trained with FSDP2, served by SGLang."""

from rlscale.architectures.family import Family

FAMILY = Family(name="mixtral", sliding_window=True, chunked_logits=True)
