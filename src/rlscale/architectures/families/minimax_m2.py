"""MiniMax-M2: every layer has experts, and queries and keys are normalised over all heads together."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.decoder_weights import HF_LAYER, MEGATRON_LAYER
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames, TensorLayout, Weight

_EXPERT_BIAS = Weight(
    megatron=f"{MEGATRON_LAYER}.mlp.router.expert_bias",
    hf=(f"{HF_LAYER}.block_sparse_moe.e_score_correction_bias",),
)
# Not named q_layernorm: Megatron-core would sum the gradients of tensor-parallel ranks, which hold different heads.
_NORMS = tuple(
    Weight(
        megatron=f"{MEGATRON_LAYER}.self_attention.{each}_norm.weight",
        hf=(f"{HF_LAYER}.self_attn.{each}_norm.weight",),
        layout=TensorLayout.rows,
    )
    for each in "qk"
)

FAMILY = Family(
    name="minimax_m2",
    implied={
        "use_qk_norm": True,
        "attention_bias": False,
        "num_shared_experts": 0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
    },
    sigmoid_experts=True,
    wide_qk_norm=True,
    rotary_fraction=1.0,
    rotary_base=5_000_000.0,
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(weights.QKV, weights.OUTPUT, *_NORMS, weights.INPUT_NORM),
        dense=(),
        router=(weights.MIXTRAL_ROUTER[0], _EXPERT_BIAS, weights.MIXTRAL_ROUTER[1]),
        expert=weights.MIXTRAL_EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    embedded=True,
)
