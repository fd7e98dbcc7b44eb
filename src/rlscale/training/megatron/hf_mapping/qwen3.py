"""Qwen3, dense: queries and keys are normalised, nothing has a bias."""

from rlscale.training.megatron.hf_mapping import decoder
from rlscale.training.megatron.hf_mapping.mapping import Names

ATTENTION = (decoder.QKV, decoder.OUTPUT, decoder.QUERY_NORM, decoder.KEY_NORM, decoder.INPUT_NORM)

NAMES = Names(
    before=(decoder.EMBEDDING,),
    attention=ATTENTION,
    dense=(decoder.GATE_UP, decoder.DOWN, decoder.MLP_NORM),
    after=(decoder.FINAL_NORM, decoder.HEAD),
)
