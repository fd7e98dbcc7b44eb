"""Attention whose queries and keys are normalised over all heads together, as in transformers' `MiniMaxM2Attention`.

Shape legend: L positions, B rows, H heads of this rank, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class WideRmsNorm(nn.Module):
    """RMS norm over the heads of all tensor-parallel ranks: y = x / sqrt(mean(x^2) + eps) * weight.

    Each rank has the weights of its heads, whose gradient is complete without those of other ranks.
    """

    def __init__(self, config: TransformerConfig, *, num_heads: int, num_ranks: int) -> None:
        super().__init__()
        width = num_heads // num_ranks * config.kv_channels
        ones = torch.ones(width, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(ones)
        self.eps, self.total, self.is_divided = config.layernorm_epsilon, num_heads * config.kv_channels, num_ranks > 1
        # Megatron-core counts a parameter without these attributes once for all tensor-parallel ranks.
        self.weight.tensor_model_parallel = self.is_divided  # type: ignore[attr-defined]
        self.weight.partition_dim, self.weight.partition_stride = 0, 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [L, B, H, D]."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.is_divided:
            # Summed over the ranks in both passes: the heads of every rank depend on the sum.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = (wide * torch.rsqrt(squares / self.total + self.eps)).to(x.dtype)
        return (self.weight * normed).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight for a checkpoint, divided over the tensor-parallel ranks along axis 0."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )
        return state


class WideNormAttention(SelfAttention):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's attention with such norms before the rotation. Every rank must have at least one key head."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        num_ranks = self.pg_collection.tp.size()
        assert config.num_query_groups % num_ranks == 0, "a rule requires that tensor-parallel ranks divide key heads"
        self.q_norm = WideRmsNorm(config, num_heads=config.num_attention_heads, num_ranks=num_ranks)
        self.k_norm = WideRmsNorm(config, num_heads=config.num_query_groups, num_ranks=num_ranks)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Normalised queries and keys, and values. [L, B, H, D] each."""
        query, key, *further = super().get_query_key_value_tensors(*args, **options)
        return (self.q_norm(query), self.k_norm(key), *further)
