"""Qwen3 with experts; layers of `mlp_only_layers` are those of the dense model.

Published checkpoints have each matrix of each expert by itself, and so it is here; in memory transformers keeps those
of a layer as one tensor.
"""

from rlscale.training.megatron.hf_mapping import decoder, qwen3
from rlscale.training.megatron.hf_mapping.decoder import HF, MEGATRON
from rlscale.training.megatron.hf_mapping.mapping import Layout, Names, Weight

_EXPERT, _HF_EXPERT = f"{MEGATRON}.mlp.experts.local_experts.{{j}}", f"{HF}.mlp.experts.{{j}}"

EXPERT = (
    Weight(
        megatron=f"{_EXPERT}.linear_fc1.weight",
        hf=(f"{_HF_EXPERT}.gate_proj.weight", f"{_HF_EXPERT}.up_proj.weight"),
        layout=Layout.gated,
    ),
    Weight(megatron=f"{_EXPERT}.linear_fc2.weight", hf=(f"{_HF_EXPERT}.down_proj.weight",), layout=Layout.columns),
)
ROUTER = (
    Weight(megatron=f"{MEGATRON}.mlp.router.weight", hf=(f"{HF}.mlp.gate.weight",)),
    Weight(megatron=f"{MEGATRON}.pre_mlp_layernorm.weight", hf=(f"{HF}.post_attention_layernorm.weight",)),
)

NAMES = Names(
    before=(decoder.EMBEDDING,),
    attention=qwen3.ATTENTION,
    dense=qwen3.NAMES.dense,
    router=ROUTER,
    expert=EXPERT,
    after=(decoder.FINAL_NORM, decoder.HEAD),
)
