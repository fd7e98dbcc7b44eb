"""A few small tensors under names of weights, for the tests of weight transports."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rlscale.weights.safetensors_folder import TensorFiles, finish_folder, start_folder, write_files


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"model.layers.{i}.weight": torch.randn(30, 31, generator=generator) for i in range(3)}
    weights["model.norm.weight"] = torch.randn(7, generator=generator).bfloat16()
    weights["lm_head.weight"] = torch.randn(100, 33, generator=generator)  # larger than a bucket
    return weights


def write_folder(
    folder: Path, weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, model_folder: Path | None
) -> TensorFiles:
    """Writes a full folder as the only sender."""
    start_folder(folder)
    written = write_files(folder, weights, bucket_bytes=bucket_bytes)
    finish_folder(folder, written, model_folder=model_folder)
    return written
