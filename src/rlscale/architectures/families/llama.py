"""Llama 3. The biases of `attention_bias=true` are not in its table of weights."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

FAMILY = Family(
    name="llama",
    implied={"use_qk_norm": False},
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, weights.OUTPUT, weights.INPUT_NORM),
        dense=weights.GATED_MLP,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    bridge="llama",
    embedded=True,
    fused_cpu=True,
    chunked_logits=True,
)
