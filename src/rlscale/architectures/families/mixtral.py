"""Mixtral: Mistral with experts. Served by SGLang."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.decoder_weights import MIXTRAL_EXPERT, MIXTRAL_ROUTER
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames

FAMILY = Family(
    name="mixtral",
    implied={"num_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": True},
    sliding_window=True,
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, weights.OUTPUT, weights.INPUT_NORM),
        dense=(),
        router=MIXTRAL_ROUTER,
        expert=MIXTRAL_EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    bridge="mixtral",
    chunked_logits=True,
)
