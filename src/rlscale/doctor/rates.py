"""Measured rates of a device: matrix products and copies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}


def synchronize(device: str) -> None:
    """Waits until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


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


def measure_matmul(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of two square matrices of `MATMUL_SIZE`.

    Of random values: on a GPU a product of zeros is faster, because it draws less power.
    """
    size = MATMUL_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # As a linear layer computes it: the second matrix is transposed.
    seconds = measure_seconds(lambda: a @ b.T, device=device)
    return 2 * size**3 / seconds


def measure_copy(device: str) -> float:
    """Bytes per second of a copy on the device, each byte counted once."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return source.nbytes / measure_seconds(lambda: target.copy_(source), device=device)
