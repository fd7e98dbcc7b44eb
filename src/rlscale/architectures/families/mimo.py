"""MiMo-7B: Qwen2's layers, and one for multi-token prediction."""

from dataclasses import replace

from rlscale.architectures.families import qwen2
from rlscale.architectures.weight_names import MtpNames, TensorLayout, Weight

FAMILY = replace(
    qwen2.FAMILY,
    name="mimo",
    transformers_name="qwen2",
    mtp=MtpNames(
        hf_layer="model.mtp_layers.{k}",
        own=(
            Weight(megatron="enorm.weight", hf=("token_layernorm.weight",)),
            Weight(megatron="hnorm.weight", hf=("hidden_layernorm.weight",)),
            # Its projection takes the hidden state first, that of Megatron-core the embedding.
            Weight(megatron="eh_proj.weight", hf=("input_proj.weight",), layout=TensorLayout.rows_swapped),
            Weight(megatron="final_layernorm.weight", hf=("final_layernorm.weight",)),
        ),
    ),
    bridge="mimo",
)
