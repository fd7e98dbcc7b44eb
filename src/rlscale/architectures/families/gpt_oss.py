"""gpt-oss: sinks in attention, every other layer with a sliding window, and experts with biases in stacked tensors."""

from rlscale.architectures import decoder_weights as weights
from rlscale.architectures.decoder_weights import HF_LAYER, MEGATRON_LAYER
from rlscale.architectures.family import Family
from rlscale.architectures.weight_names import HfNames, TensorLayout, Weight

_ATTENTION, _HF_ATTENTION = f"{MEGATRON_LAYER}.self_attention", f"{HF_LAYER}.self_attn"
_EXPERT, _HF_EXPERTS = f"{MEGATRON_LAYER}.mlp.experts.local_experts.{{j}}", f"{HF_LAYER}.mlp.experts"

_SINKS = Weight(
    megatron=f"{_ATTENTION}.core_attention.softmax_offset",
    hf=(f"{_HF_ATTENTION}.sinks",),
    layout=TensorLayout.rows,
)
# Every rank has the whole bias of a layer whose inputs are divided.
_OUTPUT_BIAS = Weight(megatron=f"{_ATTENTION}.linear_proj.bias", hf=(f"{_HF_ATTENTION}.o_proj.bias",))
_ROUTER = (
    *(
        Weight(megatron=f"{MEGATRON_LAYER}.mlp.router.{each}", hf=(f"{HF_LAYER}.mlp.router.{each}",))
        for each in ("weight", "bias")
    ),
    Weight(megatron=f"{MEGATRON_LAYER}.pre_mlp_layernorm.weight", hf=(f"{HF_LAYER}.post_attention_layernorm.weight",)),
)


def _expert(layer: str, hf_name: str, layout: TensorLayout) -> Weight:
    return Weight(megatron=f"{_EXPERT}.{layer}", hf=(f"{_HF_EXPERTS}.{hf_name}",), layout=layout, stacked=True)


FAMILY = Family(
    name="gpt_oss",
    implied={"num_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": True},
    sinks=True,
    rotary_base=150_000.0,
    hf_names=HfNames(
        before=(weights.EMBEDDING,),
        attention=(_SINKS, weights.QKV, weights.QKV_BIAS, weights.OUTPUT, _OUTPUT_BIAS, weights.INPUT_NORM),
        dense=(),
        router=_ROUTER,
        expert=(
            _expert("linear_fc1.weight", "gate_up_proj", TensorLayout.gated_pairs),
            _expert("linear_fc1.bias", "gate_up_proj_bias", TensorLayout.gated_pairs),
            _expert("linear_fc2.weight", "down_proj", TensorLayout.columns),
            _expert("linear_fc2.bias", "down_proj_bias", TensorLayout.whole),
        ),
        after=(weights.FINAL_NORM, weights.HEAD),
    ),
    embedded=True,
)
