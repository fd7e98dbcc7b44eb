"""Rates of a device: measured products of matrices, and the data sheets of known GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rlscale.config import ComputeDtype
from rlscale.plan.hardware import HARDWARE

NUM_MEASURED = 5
"""Measurements of a rate. The best one counts: other work on the machine may disturb some of them."""

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


class DeviceRate:
    """Floating-point operations per second of one rank's device.

    Of the data sheet for a GPU that `rlscale.plan.hardware` knows, otherwise measured by products of matrices, in the
    first calls: the data sheet of a CPU has a rate that torch does not reach.

    Example:
        rate = DeviceRate("cpu", ComputeDtype.float32)
        rate.flops()  # 3.4e11
    """

    def __init__(self, device: str, dtype: ComputeDtype) -> None:
        self._device, self._dtype = device, dtype
        self._best, self._num_measured = _data_sheet_rate(device, dtype), 0
        self._is_known = self._best > 0

    def flops(self) -> float:
        """The rate, after one more measurement where it needs one. Takes some hundredths of a second then."""
        if not self._is_known and self._num_measured < NUM_MEASURED:
            self._num_measured += 1
            self._best = max(self._best, measure_matmul(self._device, getattr(torch, self._dtype), repeats=2))
        return self._best


def _data_sheet_rate(device: str, dtype: ComputeDtype) -> float:
    """0: not known."""
    if device != "cuda":
        return 0.0
    name = torch.cuda.get_device_name().upper()
    return next((found.flops[dtype] for key, found in HARDWARE.items() if key.upper() in name), 0.0)


def measure_matmul(device: str, dtype: torch.dtype, *, repeats: int = 5) -> float:
    """Floating-point operations per second of a product of two square matrices of `MATMUL_SIZE`.

    Of random values: on a GPU a product of zeros is faster, because it draws less power. Changes no random state.
    """
    size = MATMUL_SIZE[device]
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    # As a linear layer computes it: the second matrix is transposed.
    seconds = measure_seconds(lambda: a @ b.T, device=device, repeats=repeats)
    return 2 * size**3 / seconds


def measure_seconds(run: Callable[[], object], *, device: str, repeats: int = 5) -> float:
    """Mean time of a call after one call as a warm-up. The shortest mean of three, which other work disturbs least."""
    run()
    synchronize(device)
    means = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        means.append((time.perf_counter() - began) / repeats)
    return min(means)


def synchronize(device: str) -> None:
    """Waits until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
