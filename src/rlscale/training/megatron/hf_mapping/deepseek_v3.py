"""DeepSeek-V3, and Kimi-K2 with its layers: latent attention, experts of which some see every token, a bias of scores.

The bias by which experts are chosen is a buffer on both sides, in float32 whatever the weights are.
"""

from rlscale.training.megatron.hf_mapping import decoder, qwen3, qwen3_moe
from rlscale.training.megatron.hf_mapping.decoder import HF, MEGATRON
from rlscale.training.megatron.hf_mapping.mapping import Layout, Names, Weight

_ATTENTION, _HF_ATTENTION = f"{MEGATRON}.self_attention", f"{HF}.self_attn"
_SHARED, _HF_SHARED = f"{MEGATRON}.mlp.shared_experts", f"{HF}.mlp.shared_experts"

INPUT_NORM = Weight(megatron=f"{MEGATRON}.input_layernorm.weight", hf=(f"{HF}.input_layernorm.weight",))
QUERIES = (
    Weight(megatron=f"{_ATTENTION}.linear_q_down_proj.weight", hf=(f"{_HF_ATTENTION}.q_a_proj.weight",)),
    Weight(megatron=f"{_ATTENTION}.linear_q_up_proj.layer_norm_weight", hf=(f"{_HF_ATTENTION}.q_a_layernorm.weight",)),
    Weight(
        megatron=f"{_ATTENTION}.linear_q_up_proj.weight", hf=(f"{_HF_ATTENTION}.q_b_proj.weight",), layout=Layout.rows
    ),
)
PLAIN_QUERIES = (
    Weight(megatron=f"{_ATTENTION}.linear_q_proj.weight", hf=(f"{_HF_ATTENTION}.q_proj.weight",), layout=Layout.rows),
)
KEYS_VALUES = (
    Weight(megatron=f"{_ATTENTION}.linear_kv_down_proj.weight", hf=(f"{_HF_ATTENTION}.kv_a_proj_with_mqa.weight",)),
    Weight(
        megatron=f"{_ATTENTION}.linear_kv_up_proj.layer_norm_weight", hf=(f"{_HF_ATTENTION}.kv_a_layernorm.weight",)
    ),
    Weight(
        megatron=f"{_ATTENTION}.linear_kv_up_proj.weight", hf=(f"{_HF_ATTENTION}.kv_b_proj.weight",), layout=Layout.rows
    ),
)
ROUTER = (
    *qwen3_moe.ROUTER,
    Weight(megatron=f"{MEGATRON}.mlp.router.expert_bias", hf=(f"{HF}.mlp.gate.e_score_correction_bias",)),
    Weight(
        megatron=f"{_SHARED}.linear_fc1.weight",
        hf=(f"{_HF_SHARED}.gate_proj.weight", f"{_HF_SHARED}.up_proj.weight"),
        layout=Layout.gated,
    ),
    Weight(megatron=f"{_SHARED}.linear_fc2.weight", hf=(f"{_HF_SHARED}.down_proj.weight",), layout=Layout.columns),
)


def _names(queries: tuple[Weight, ...]) -> Names:
    return Names(
        before=(decoder.EMBEDDING,),
        attention=(*queries, *KEYS_VALUES, decoder.OUTPUT, INPUT_NORM),
        dense=qwen3.NAMES.dense,
        router=ROUTER,
        expert=qwen3_moe.EXPERT,
        after=(decoder.FINAL_NORM, decoder.HEAD),
    )


NAMES = _names(QUERIES)
WITH_PLAIN_QUERIES = _names(PLAIN_QUERIES)
"""Of a model whose queries are not compressed."""
