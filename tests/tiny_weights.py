"""A few small tensors under names of weights, for the tests of weight transports."""

import torch
from torch import Tensor


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"model.layers.{i}.weight": torch.randn(30, 31, generator=generator) for i in range(3)}
    weights["model.norm.weight"] = torch.randn(7, generator=generator).bfloat16()
    weights["lm_head.weight"] = torch.randn(100, 33, generator=generator)  # larger than a bucket
    return weights
