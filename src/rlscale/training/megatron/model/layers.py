"""Linear layers and norms in plain torch, with the parameter names of Transformer Engine's.

The same names let weight mappings and checkpoints work unchanged on a CPU and with Transformer Engine on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RmsNorm(nn.RMSNorm):
    """RMS norm of the last axis. With sequence parallelism its gradient is summed over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        mark_sequence_parallel(self.weight, config)
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None, "set by the constructor"
        return rms_norm(x, self.weight, self.eps, is_zero_centered=self.is_zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_zero_centered: bool) -> Tensor:
    """RMS norm of the last axis: y = x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) if it is zero-centred."""
    if not is_zero_centered:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # In float32, as in transformers: in bfloat16 a small weight would be lost in the sum.
    return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)


def mark_sequence_parallel(weight: nn.Parameter, config: TransformerConfig) -> None:
    """Makes Megatron-core sum a weight's gradient over the tensor-parallel ranks with sequence parallelism."""
    # `finalize_model_grads` reads this attribute.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def mark_divided(parameter: nn.Parameter) -> None:
    """Makes Megatron-core count a parameter on all tensor-parallel ranks in the gradient norm, not on the first."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]


def mark_expert_biases(chunk: nn.Module) -> None:
    """Makes Megatron-core treat the biases of experts as parameters of their rank only.

    It marks those of the last layer as copies, whose gradients it sums over the tensor-parallel ranks and counts once,
    but these ranks have other experts.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name and ".linear_fc2.bias" in name:
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            mark_divided(parameter)


class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron-core has no types
    """RMS norm of the input, followed by a linear layer whose outputs are divided over the ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        ones = torch.ones(input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.layer_norm_weight = nn.Parameter(ones)
        mark_sequence_parallel(self.layer_norm_weight, config)
        self.eps, self.is_zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        normed = rms_norm(input_, self.layer_norm_weight, self.eps, is_zero_centered=self.is_zero_centered)
        output, bias = super().forward(normed, *args, **options)
        return output, bias


class ExpertRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron-core has no types
    """The last layer of an expert."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        # Megatron-core adds the bias in place, which autograd refuses for a view from a custom function.
        return output if bias is None else output.clone(), bias


def with_post_norm(linear: type[nn.Module], norm: type[nn.Module]) -> type[nn.Module]:
    """A row-parallel layer class that normalises its output before the residual addition, as GLM-4 does."""

    class RowParallelLinearNorm(linear):  # type: ignore[misc, valid-type]  # of Megatron-core or Transformer Engine
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            assert not config.add_bias_linear, "Megatron-core adds the bias later, so it would follow the norm"
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, input_: Tensor) -> tuple[Tensor, None]:
            output, _ = self.project(input_)
            return self.post_layernorm(output), None

        def project(self, input_: Tensor) -> tuple[Tensor, None]:
            # Separate, for adapters: they are part of the product.
            output, bias = super().forward(input_)
            return output, bias

    return RowParallelLinearNorm
