"""Rotary position embeddings with the frequencies that transformers computes for a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rotary types. All of them change the frequencies; YaRN also scales queries and keys."""


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """`rope_parameters` of a config, completed with the defaults."""
    found = dict(config.rope_parameters or {})
    found.setdefault("rope_type", "default")
    found.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    return found


def inverse_frequencies(config: PreTrainedConfig, *, head_dim: int) -> Tensor:
    """Rotary frequencies: angle = position * frequency, in float32. [rotated width / 2]"""
    rope = rope_parameters(config)
    if rope["rope_type"] != "default":
        frequencies: Tensor
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        assert factor == 1.0 or rope["rope_type"] == "yarn", f"rotary type {rope['rope_type']} scales queries and keys"
        return frequencies
    # The default: theta ** (-2 i / width) over the rotated part of a head.
    width = int(head_dim * rope["partial_rotary_factor"])
    return 1.0 / (float(rope["rope_theta"]) ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def yarn_fields(config: PreTrainedConfig) -> dict[str, float]:
    """Attributes of a TransformerConfig with which Megatron-core's attention scales queries and keys as YaRN does.

    Empty for other rotary types. Megatron-core computes the scale `0.1 ln(factor) + 1` from a factor. The factor
    returned here gives the scale that transformers uses, which a config can also set directly.
    """
    if rope_parameters(config)["rope_type"] != "yarn":
        return {}
    _, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert scale >= 1.0, "check_architecture rejects a scale below 1"
    # Inverse of scale = 0.1 ln(factor) + 1.
    return {"yarn_rotary_scaling_factor": math.exp((scale - 1.0) / 0.1)}


class ModelRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's rotary embedding with given frequencies."""

    def __init__(self, frequencies: Tensor, *, is_interleaved: bool, cp_group: ProcessGroup) -> None:
        super().__init__(
            2 * len(frequencies), 1.0, rotary_interleaved=is_interleaved, use_cpu_initialization=True, cp_group=cp_group
        )
        self.inv_freq = frequencies.to(torch.cuda.current_device())


class ImageRotaryEmbedding(nn.Module):
    """Rotary embedding of models with images: each frequency takes its position from one of three rows.

    Args:
        frequencies: as transformers computes them. [F]
        rows: index of the row of each frequency, see `rotary_rows`. [F]
    """

    def __init__(self, frequencies: Tensor, rows: Sequence[int]) -> None:
        super().__init__()
        assert len(rows) == len(frequencies), "every frequency has a row"
        device = torch.cuda.current_device()
        self.frequencies, self.rows = frequencies.to(device), torch.tensor(rows, device=device)

    def forward(self, position_ids: Tensor, mrope_section: object, cp_group: ProcessGroup | None = None) -> Tensor:
        """Angles of packed tokens, for both halves of a head: [T, 1, 1, 2 F].

        Args:
            position_ids: frames, rows and columns, on all context-parallel ranks. [3, 1, T]
            mrope_section: of Megatron-core's own embedding, which knows rows in blocks only.
            cp_group: unused: attention takes the angles of this rank.
        """
        angles = position_ids[self.rows, 0].T.float() * self.frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None]
