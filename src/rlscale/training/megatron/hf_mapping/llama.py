"""Llama 3; the biases of `attention_bias=true` are not among its names."""

from rlscale.training.megatron.hf_mapping import decoder
from rlscale.training.megatron.hf_mapping.mapping import Names

NAMES = Names(
    before=(decoder.EMBEDDING,),
    attention=(decoder.QKV, decoder.OUTPUT, decoder.INPUT_NORM),
    dense=(decoder.GATE_UP, decoder.DOWN, decoder.MLP_NORM),
    after=(decoder.FINAL_NORM, decoder.HEAD),
)
