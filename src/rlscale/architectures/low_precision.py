"""Formats of low-precision weights: the layers that are quantised, their sizes, and how a `config.json` declares them.

    fp8    <layer>.weight [O, I] float8_e4m3fn, <layer>.weight_scale_inv [O / 128, I / 128] float32
    int4   <layer>.weight_packed [O, I / 8] int32, <layer>.weight_scale [O, I / 32], <layer>.weight_shape [2] int64

These are the names of DeepSeek's FP8 checkpoints and of compressed-tensors' format `pack-quantized`. Experts of gpt-oss
are stacked and transposed, [E, I, O]. With fp8 they stay so; with int4, whose groups are along I, they are [E, O, I].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRECISIONS = ("fp8", "int4")
"""Values of `rollout.weight_precision`, as engines name them."""

FP8_BLOCK = 128
"""Rows and columns of a block with one scale."""

INT4_GROUP = 32
"""Consecutive inputs of one output with one scale."""

_LAYERS = "q|k|v|o|gate|up|down|gate_up|q_a|q_b|kv_b"
_NAMES = (
    rf"({_LAYERS})_proj\.weight",
    r"kv_a_proj_with_mqa\.weight",
    r"linear_attn\.(in_proj_(qkvz|qkv|z)|out_proj)\.weight",
    r"experts\.\d+\.w[123]\.weight",  # MiniMax-M2
    r"experts\.(gate_up|down)_proj",  # gpt-oss
)
_LINEAR = re.compile(rf"(.+\.)?layers\.\d+\.(.+\.)?({'|'.join(_NAMES)})")
_KEPT = ("gate", "in_proj_a", "in_proj_b", "in_proj_ba", "lm_head", "shared_expert_gate", "visual")
"""Layers, and parts of a model, that engines would otherwise take for quantised ones, by a part of their names."""
_INT4_WEIGHTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": INT4_GROUP,
        "dynamic": False,
    }
)


def is_quantized(name: str) -> bool:
    """Whether a weight is quantised, by its Hugging Face name: linear layers of attention, MLPs and experts.

    Embeddings, the output layer, norms, biases, routers and vision towers keep their dtype, as do the gate of a shared
    expert and, in linear attention, convolution, betas and decays: so do the published checkpoints in FP8.
    """
    return _LINEAR.fullmatch(name) is not None


def quantized_bytes(rows: int, columns: int, *, precision: str, dtype_bytes: int) -> int:
    """Bytes of one quantised weight with its scales.

    Args:
        precision: `fp8` or `int4`.
        dtype_bytes: size of an element of the unquantised weight, and of a scale of int4.
    """
    if precision == "fp8":
        return rows * columns + 4 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return rows * columns // 2 + rows * (columns // INT4_GROUP) * dtype_bytes + 2 * 8


def quantization_config(precision: str) -> dict[str, Any]:
    """The entry `quantization_config` of a `config.json`, by which an engine expects these tensors."""
    if precision == "fp8":
        block = [FP8_BLOCK, FP8_BLOCK]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
            "modules_to_not_convert": list(_KEPT),
        }
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [f"re:(.*[.])?{name}([.].*)?" for name in _KEPT],
        "config_groups": {"group_0": {**group, "weights": dict(_INT4_WEIGHTS)}},
    }
