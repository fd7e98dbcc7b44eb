"""Multi-head latent attention (DeepSeek-V3, arXiv:2412.19437), with the positions and norms of transformers.

    hidden ─ down ─ norm ─ up ─> queries of all heads
           └ down ┬ norm ─ up ─> keys without position, values
                  └ rotated, one for all heads ──> the rotary part of each key

Each tensor-parallel rank holds the whole down-projections; the up-projections are divided by heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlscale.training.megatron.model.layers import mark_sequence_parallel
from rlscale.training.megatron.model.rotary import ModelRotaryEmbedding, inverse_frequencies, rope_parameters

if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine its names exist but are no classes, and Megatron-core 0.16 mistakes that for an
    # installed Transformer Engine.
    multi_latent_attention.HAVE_TE = False

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents. transformers uses it whatever `rms_norm_eps` of the other norms is."""


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds whole, like Transformer Engine's `TELinear`."""

    def __init__(self, input_size: int, output_size: int, *, config: MLATransformerConfig) -> None:
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(config.init_method(weight))
        # With sequence parallelism each rank computes other tokens, so gradients are summed as those of norms are.
        mark_sequence_parallel(self.weight, config)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return F.linear(input_, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's latent attention. The caller must set the positions with `set_positions`."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        is_replicated = submodules.linear_kv_down_proj is ReplicatedLinear
        if is_replicated:
            # Megatron-core 0.16 accepts only its own classes here, so the layers are replaced after construction.
            own = ("linear_q_down_proj", "linear_kv_down_proj")
            submodules = replace(submodules, **dict.fromkeys(own, ColumnParallelLinear))
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        if is_replicated:
            width = config.kv_lora_rank + config.qk_pos_emb_head_dim
            self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, width, config=config)
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config=config)
        self.linear_kv_up_proj.eps = LATENT_EPS
        if config.q_lora_rank is not None:
            self.linear_q_up_proj.eps = LATENT_EPS


class _ScaledRotaryEmbedding(ModelRotaryEmbedding):
    """Frequencies of YaRN and the factor on cosine and sine that Megatron-core expects with them."""

    def __init__(self, frequencies: Tensor, *, scale: float, cp_group: ProcessGroup) -> None:
        super().__init__(frequencies, is_interleaved=False, cp_group=cp_group)
        self.scale = scale

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, float]:
        return super().forward(*args, **options), self.scale


def set_positions(attention: LatentAttention, config: PreTrainedConfig) -> None:
    """Replaces a layer's rotary embedding by one with the frequencies that transformers computes for a model."""
    frequencies = inverse_frequencies(config, head_dim=attention.config.qk_pos_emb_head_dim)
    group = attention.pg_collection.cp
    if attention.config.rope_type == "yarn":
        _, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        attention.rotary_pos_emb = _ScaledRotaryEmbedding(frequencies, scale=scale, cp_group=group)
    else:
        attention.rotary_pos_emb = ModelRotaryEmbedding(frequencies, is_interleaved=False, cp_group=group)


def latent_sizes(hf_fields: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of an MLATransformerConfig that a TransformerConfig does not have.

    Args:
        hf_fields: of the model, by key of the config group `model`.
        config: of transformers.
    """
    rope = rope_parameters(config)
    is_yarn, is_scaled = rope["rope_type"] == "yarn", rope["rope_type"] != "default"
    return {
        "q_lora_rank": hf_fields.get("q_lora_rank"),
        "kv_lora_rank": hf_fields["kv_lora_rank"],
        "qk_head_dim": hf_fields["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf_fields["qk_rope_head_dim"],
        "v_head_dim": hf_fields["v_head_dim"],
        "rope_type": "yarn" if is_yarn else "rope",
        # Megatron-core scales the scores by 1 / sqrt(width) * (0.1 mscale_all_dim ln(factor) + 1)^2.
        "rotary_scaling_factor": float(rope.get("factor") or 1.0) if is_scaled else 1.0,
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0) if is_scaled else 0.0,
        "original_max_position_embeddings": int(rope.get("original_max_position_embeddings") or 4096),
    }
