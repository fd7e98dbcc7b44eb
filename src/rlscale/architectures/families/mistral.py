"""Mistral: Llama's layers with a sliding window."""

from rlscale.architectures.family import Family

FAMILY = Family(
    name="mistral",
    sliding_window=True,
    embedded=True,
    fused_cpu=True,
    chunked_logits=True,
)
