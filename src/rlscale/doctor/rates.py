"""Measured rate of copies on a device."""

from __future__ import annotations

import torch

from rlscale.training.profiling.device_rate import measure_seconds

COPY_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}


def measure_copy(device: str) -> float:
    """Bytes per second of a copy on the device, each byte counted once."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return source.nbytes / measure_seconds(lambda: target.copy_(source), device=device)
