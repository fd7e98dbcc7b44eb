"""Mistral: Llama's layers with a sliding window in its first models, which Megatron-core does not train."""

from rlscale.architectures.families import llama
from rlscale.architectures.family import Family

FAMILY = Family(
    name="mistral",
    sliding_window=True,
    hf_names=llama.FAMILY.hf_names,
    bridge="llama",
    embedded=True,
    fused_cpu=True,
    chunked_logits=True,
)
