"""Qwen2 and Qwen2.5: queries, keys and values have a bias."""

from rlscale.training.megatron.hf_mapping import decoder
from rlscale.training.megatron.hf_mapping.mapping import Names

NAMES = Names(
    before=(decoder.EMBEDDING,),
    attention=(decoder.QKV, decoder.QKV_BIAS, decoder.OUTPUT, decoder.INPUT_NORM),
    dense=(decoder.GATE_UP, decoder.DOWN, decoder.MLP_NORM),
    after=(decoder.FINAL_NORM, decoder.HEAD),
)
