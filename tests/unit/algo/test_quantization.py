"""Weights in 8 and 4 bits: against torch's own casts, literal words of compressed-tensors, and bounds of the error."""

import pytest
import torch

from rlscale.algo.quantization import (
    FP8,
    dequantize_fp8,
    dequantize_int4,
    quantize_fp8,
    quantize_int4,
)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(128, 128), (64, 96), (300, 160), (256, 384)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_of_fp8_is_torchs_cast_of_the_scaled_block(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).unsqueeze(1)
    values, scales = quantize_fp8(weight)
    assert values.dtype == FP8 and values.shape == weight.shape and scales.dtype == torch.float32
    assert list(scales.shape) == [-(-shape[0] // 128), -(-shape[1] // 128)]
    for n in range(scales.shape[0]):
        for m in range(scales.shape[1]):
            rows, columns = slice(n * 128, (n + 1) * 128), slice(m * 128, (m + 1) * 128)
            block = weight[rows, columns]
            scale = block.abs().max() / 448
            assert scales[n, m] == scale
            expected = (block / scale).to(FP8)
            assert torch.equal(values[rows, columns].float(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_of_fp8_is_below_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape).to(dtype)
    values, scales = quantize_fp8(weight)
    error = (dequantize_fp8(values, scales, dtype=torch.float32) - weight.float()).abs()
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of a number, or of the smallest normal one, 2^-6.
    each = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    limit = torch.maximum(weight.float().abs() / 16, each * 2**-6 / 16)
    assert bool((error <= limit * 1.0001).all())
    assert dequantize_fp8(values, scales, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_int4_is_below_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight = torch.randn(24, 96).to(dtype)
    words, scales = quantize_int4(weight)
    assert words.dtype == torch.int32 and list(words.shape) == [24, 12]
    assert scales.dtype == dtype and list(scales.shape) == [24, 3]
    error = (dequantize_int4(words, scales, dtype=torch.float32) - weight.float()).abs()
    step = scales.float().repeat_interleave(32, 1)
    # A scale rounded down in bfloat16 clips the largest value of its group by up to 7 * 2^-9 of a step.
    assert bool((error <= step * (0.5 + 1e-4)).all())


def test_int4_words_are_those_of_compressed_tensors() -> None:
    # `pack_to_int32(values, 4)` of compressed-tensors 0.18 gave the words.
    rows = [
        [-7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 0, *([7, -7] * 8)],
        [0] * 15 + [-1] + [1] * 16,
    ]
    expected = [
        [-2023406815, -1880241239, 522133279, 522133279],
        [-2004318072, 2022213768, -1717986919, -1717986919],
    ]
    scales = torch.tensor([[0.5], [2.0]])
    dense = dequantize_int4(torch.tensor(expected, dtype=torch.int32), scales, dtype=torch.float32)
    assert torch.equal(dense, torch.tensor(rows) * scales)
    # A largest value of 7 steps leaves every value as it is.
    words, found = quantize_int4(torch.tensor(rows[:1]) * 0.5)
    assert words.tolist() == expected[:1] and found.tolist() == [[0.5]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_quantisation_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight = torch.randn(128, 256).to(dtype)
    once = dequantize_fp8(*quantize_fp8(weight), dtype=torch.float32)
    assert torch.equal(dequantize_fp8(*quantize_fp8(once), dtype=torch.float32), once)
    once = dequantize_int4(*quantize_int4(weight.float()), dtype=torch.float32)
    torch.testing.assert_close(dequantize_int4(*quantize_int4(once), dtype=torch.float32), once)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(130, 64)
    assert not dequantize_fp8(*quantize_fp8(zeros), dtype=torch.float32).any()
    assert not dequantize_int4(*quantize_int4(zeros), dtype=torch.float32).any()


def test_groups_of_int4_must_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match="multiple of 32, got 40"):
        quantize_int4(torch.zeros(8, 40))
