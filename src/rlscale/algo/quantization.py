"""Weights in 8 and 4 bits: block scales in the formats of DeepSeek's FP8 and of compressed-tensors' INT4.

Shape legend: O output width, I input width, N and M blocks along both, G groups of an input row, W words of 8 values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.architectures.low_precision import FP8_BLOCK, INT4_GROUP

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""448, the largest number of e4m3."""

INT4_MAX = 7
"""Largest magnitude: symmetric around 0, so -8 is not used."""

_PER_WORD = 8  # 4-bit values of an int32


def quantize_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises blocks of 128 x 128: `scale = max |w| / 448`, `q = e4m3(w / scale)`.

    Returns:
        Values [O, I] and scales [N, M] in float32, by which values are multiplied (DeepSeek's `weight_scale_inv`).
    """
    assert weight_OI.dim() == 2, f"a weight must have 2 dimensions, got {tuple(weight_OI.shape)}"
    rows, columns = weight_OI.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = F.pad(weight_OI.detach().float(), padding)
    # [N, 128, M, 128]: element (i, j) of block (n, m) is at [n, i, m, j].
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    largest_NM = blocks.abs().amax(dim=(1, 3))
    scales_NM = torch.where(largest_NM > 0, largest_NM / FP8_MAX, torch.ones_like(largest_NM))
    # The clamp is for a quotient that rounding lifts above 448, which the cast would make NaN.
    values = (blocks / scales_NM[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales_NM


def dequantize_fp8(values_OI: Tensor, scales_NM: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Weights [O, I] of the results of `quantize_fp8`."""
    rows, columns = values_OI.shape
    scales = scales_NM.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return (values_OI.float() * scales).to(dtype)


def quantize_int4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises groups of 32 inputs: `scale = max |w| / 7`, `q = round(w / scale)`, packed as `q + 8`.

    Eight values share an int32, the first in its lowest bits.

    Returns:
        Words [O, W] in int32 and scales [O, G] in the dtype of the weight.

    Raises ValueError for an input width that groups do not divide.
    """
    assert weight_OI.dim() == 2, f"a weight must have 2 dimensions, got {tuple(weight_OI.shape)}"
    rows, columns = weight_OI.shape
    if columns % INT4_GROUP:
        raise ValueError(f"the input width of an int4 weight must be a multiple of {INT4_GROUP}, got {columns}")
    groups = weight_OI.detach().float().view(rows, columns // INT4_GROUP, INT4_GROUP)
    largest_OG = groups.abs().amax(dim=2)
    scales_OG = torch.where(largest_OG > 0, largest_OG / INT4_MAX, torch.ones_like(largest_OG)).to(weight_OI.dtype)
    # Divided by the rounded scale, by which the engine multiplies.
    values = (groups / scales_OG.float().unsqueeze(2)).round().clamp(-INT4_MAX, INT4_MAX).to(torch.int32)
    nibbles = values.view(rows, columns // _PER_WORD, _PER_WORD) + 8
    # Nibbles do not overlap, so the sum in 64 bits is their union; the cast keeps its lowest 32 bits.
    words = (nibbles.long() << _shifts(nibbles.device)).sum(dim=2)
    return words.to(torch.int32), scales_OG


def dequantize_int4(words_OW: Tensor, scales_OG: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Weights [O, I] of the results of `quantize_int4`."""
    rows, columns = words_OW.shape[0], words_OW.shape[1] * _PER_WORD
    nibbles = (words_OW.unsqueeze(2) >> _shifts(words_OW.device)) & 15
    groups = (nibbles - 8).view(rows, columns // INT4_GROUP, INT4_GROUP)
    return (groups.float() * scales_OG.float().unsqueeze(2)).view(rows, columns).to(dtype)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(_PER_WORD, dtype=torch.int32, device=device) * 4
