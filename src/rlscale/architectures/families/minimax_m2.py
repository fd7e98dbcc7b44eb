"""MiniMax-M2: every layer has experts, and queries and keys are normalised over all heads together."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.decoder_weights import HF_LAYER, MEGATRON_LAYER
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames, TensorLayout, Weight

_EXPERT, _HF_MOE = f"{MEGATRON_LAYER}.mlp.experts.local_experts.{{j}}", f"{HF_LAYER}.block_sparse_moe"
_HF_EXPERT = f"{_HF_MOE}.experts.{{j}}"
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
        router=(
            Weight(megatron=f"{MEGATRON_LAYER}.mlp.router.weight", hf=(f"{_HF_MOE}.gate.weight",)),
            Weight(megatron=f"{MEGATRON_LAYER}.mlp.router.expert_bias", hf=(f"{_HF_MOE}.e_score_correction_bias",)),
            Weight(
                megatron=f"{MEGATRON_LAYER}.pre_mlp_layernorm.weight",
                hf=(f"{HF_LAYER}.post_attention_layernorm.weight",),
            ),
        ),
        expert=(
            Weight(
                megatron=f"{_EXPERT}.linear_fc1.weight",
                hf=(f"{_HF_EXPERT}.w1.weight", f"{_HF_EXPERT}.w3.weight"),
                layout=TensorLayout.gated,
            ),
            Weight(
                megatron=f"{_EXPERT}.linear_fc2.weight",
                hf=(f"{_HF_EXPERT}.w2.weight",),
                layout=TensorLayout.columns,
            ),
        ),
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    embedded=True,
)
