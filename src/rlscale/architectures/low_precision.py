"""Formats of low-precision weights: the layers that are quantised, their sizes, and how a `config.json` declares them.

    fp8    <layer>.weight [O, I] float8_e4m3fn, <layer>.weight_scale_inv [O / 128, I / 128] float32
    int4   <layer>.weight_packed [O, I / 8] int32, <layer>.weight_scale [O, I / 32], <layer>.weight_shape [2] int64

These are the names of DeepSeek's FP8 checkpoints and of compressed-tensors' format `pack-quantized`.
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
_LINEAR = re.compile(rf"(.+\.)?layers\.\d+\.(.+\.)?(({_LAYERS})_proj|kv_a_proj_with_mqa)\.weight")
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

    Embeddings, the output layer, norms, biases, routers and vision towers keep their dtype.
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
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "weights": dict(_INT4_WEIGHTS)}},
    }
