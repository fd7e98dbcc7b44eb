"""The attention of a model, by config, device and dtype."""

import pytest

from rlscale.config import AttnImplementation, ComputeDtype, FsdpConfig
from rlscale.training.attention.context_attention import CONTEXT_ATTENTION
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.fsdp.model import attention_kernel

FLASH, SDPA, EAGER = AttnImplementation.flash_attention_2, AttnImplementation.sdpa, AttnImplementation.eager
BF16, FP32 = ComputeDtype.bfloat16, ComputeDtype.float32


@pytest.mark.parametrize(
    ("choice", "device", "dtype", "packed", "padded"),
    [
        (FLASH, "cuda", BF16, "flash_attention_2", "flash_attention_2"),
        (AttnImplementation.flash_attention_3, "cuda", BF16, "flash_attention_3", "flash_attention_3"),
        (AttnImplementation.flash_attention_3, "cpu", BF16, PACKED_ATTENTION, "sdpa"),
        # flash-attn has no kernel in float32, and none for a CPU.
        (FLASH, "cuda", FP32, PACKED_ATTENTION, "sdpa"),
        (FLASH, "cpu", BF16, PACKED_ATTENTION, "sdpa"),
        (SDPA, "cuda", BF16, PACKED_ATTENTION, "sdpa"),
        (EAGER, "cuda", FP32, "eager", "eager"),
        (EAGER, "cpu", FP32, "eager", "eager"),
    ],
)
def test_each_choice_has_a_kernel_that_can_run(
    choice: AttnImplementation, device: str, dtype: ComputeDtype, packed: str, padded: str
) -> None:
    fsdp = FsdpConfig(attn_implementation=choice)
    assert attention_kernel(fsdp, device_type=device, dtype=dtype) == packed
    assert attention_kernel(fsdp, device_type=device, dtype=dtype, is_padded=True) == padded


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_context_parallelism_has_its_own(dtype: ComputeDtype) -> None:
    fsdp = FsdpConfig(attn_implementation=FLASH, context_parallel_size=2)
    assert attention_kernel(fsdp, device_type="cuda", dtype=dtype) == CONTEXT_ATTENTION
