"""Names and layouts of weights: Hugging Face <-> Megatron-core, one module a family, used for both directions."""

from collections.abc import Mapping
from types import MappingProxyType

from rlscale.training.megatron.hf_mapping import deepseek_v3, glm4, llama, qwen2, qwen3, qwen3_moe
from rlscale.training.megatron.hf_mapping.mapping import Names

FAMILIES: Mapping[str, Names] = MappingProxyType(
    {
        "qwen3": qwen3.NAMES,
        "qwen2": qwen2.NAMES,
        "llama": llama.NAMES,
        "glm4": glm4.NAMES,
        "qwen3_moe": qwen3_moe.NAMES,
        "deepseek_v3": deepseek_v3.NAMES,
        "kimi_k2": deepseek_v3.NAMES,
    }
)
"""Family -> its names."""

__all__ = ["FAMILIES", "Names"]
