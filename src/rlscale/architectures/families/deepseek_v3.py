"""DeepSeek-V3: latent attention, shared experts, and a bias on the scores that choose experts."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.decoder_weights import HF_LAYER, MEGATRON_LAYER
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames, TensorLayout, Weight

_ATTENTION, _HF_ATTENTION = f"{MEGATRON_LAYER}.self_attention", f"{HF_LAYER}.self_attn"

_INPUT_NORM = Weight(megatron=f"{MEGATRON_LAYER}.input_layernorm.weight", hf=(f"{HF_LAYER}.input_layernorm.weight",))
# The down projections are replicated; the up projections are sharded by heads.
_COMPRESSED_QUERIES = (
    Weight(megatron=f"{_ATTENTION}.linear_q_down_proj.weight", hf=(f"{_HF_ATTENTION}.q_a_proj.weight",)),
    Weight(megatron=f"{_ATTENTION}.linear_q_up_proj.layer_norm_weight", hf=(f"{_HF_ATTENTION}.q_a_layernorm.weight",)),
    Weight(
        megatron=f"{_ATTENTION}.linear_q_up_proj.weight",
        hf=(f"{_HF_ATTENTION}.q_b_proj.weight",),
        layout=TensorLayout.rows,
    ),
)
_PLAIN_QUERIES = (
    Weight(
        megatron=f"{_ATTENTION}.linear_q_proj.weight",
        hf=(f"{_HF_ATTENTION}.q_proj.weight",),
        layout=TensorLayout.rows,
    ),
)
_KEYS_VALUES = (
    Weight(megatron=f"{_ATTENTION}.linear_kv_down_proj.weight", hf=(f"{_HF_ATTENTION}.kv_a_proj_with_mqa.weight",)),
    Weight(
        megatron=f"{_ATTENTION}.linear_kv_up_proj.layer_norm_weight", hf=(f"{_HF_ATTENTION}.kv_a_layernorm.weight",)
    ),
    Weight(
        megatron=f"{_ATTENTION}.linear_kv_up_proj.weight",
        hf=(f"{_HF_ATTENTION}.kv_b_proj.weight",),
        layout=TensorLayout.rows,
    ),
)
_ROUTER = (*weights.ROUTER, weights.EXPERT_BIAS, *weights.SHARED_EXPERTS)


def _names(queries: tuple[Weight, ...]) -> HfNames:
    return HfNames(
        before=(weights.EMBEDDING,),
        attention=(*queries, *_KEYS_VALUES, weights.OUTPUT, _INPUT_NORM),
        dense=weights.GATED_MLP,
        router=_ROUTER,
        expert=weights.EXPERT,
        after=(weights.FINAL_NORM, weights.HEAD),
    )


FAMILY = Family(
    name="deepseek_v3",
    latent_attention=True,
    sigmoid_experts=True,
    hf_names=_names(_COMPRESSED_QUERIES),
    plain_query_names=_names(_PLAIN_QUERIES),
    mtp=weights.NEXTN,
    bridge="deepseek_v3",
    embedded=True,
)
