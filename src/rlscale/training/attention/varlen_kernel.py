"""Causal flash attention of torch over samples end to end, on a GPU in 16 bits.

Shape legend: T queries, J keys, H query heads, K key/value heads, D head width, S samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEnds:
    """Places of the samples among queries and keys."""

    queries: Tensor  # [S + 1] int32: 0, then the end of each sample
    keys: Tensor  # [S + 1] int32
    max_queries: int  # of a sample
    max_keys: int


def attend_varlen(
    q_THD: Tensor, k_JKD: Tensor, v_JKD: Tensor, *, ends: SampleEnds, scale: float, window: int | None
) -> Tensor:
    """Attention inside each sample, whose last query is aligned with its last key. [T, H, D of the values]

    Args:
        q_THD, k_JKD, v_JKD: in float16 or bfloat16; values may be narrower than keys.
        ends: places of the samples.
        scale: of the scores.
        window: tokens that a query sees, including itself; None: all before it.
    """
    if "scale" not in _PARAMETERS:
        # The kernel then scales by D ** -0.5.
        q_THD = q_THD * (scale * q_THD.shape[-1] ** 0.5)
    out = varlen_attn(
        q_THD,
        k_JKD,
        _pad_width(v_JKD, q_THD),
        ends.queries,
        ends.keys,
        ends.max_queries,
        ends.max_keys,
        **varlen_options(_PARAMETERS, scale=scale, window=window),
    )
    assert isinstance(out, Tensor)
    return out[..., : v_JKD.shape[-1]]


def varlen_options(parameters: Collection[str], *, scale: float, window: int | None) -> dict[str, Any]:
    """Keyword arguments of `varlen_attn` for causal attention, with the parameters that this torch has.

    torch 2.13 has `scale`, `window_size` and `enable_gqa`. Without the last one (2.11) key heads are shared anyway; 2.9
    has `is_causal` in place of `window_size`.

    Raises:
        ValueError: this torch has no kernel for a sliding window.
    """
    options: dict[str, Any] = {"scale": scale} if "scale" in parameters else {}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    if "window_size" in parameters:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ValueError(
            f"fsdp.attn_implementation must be eager for a sliding window with torch {torch.__version__}, got sdpa"
        )
    return options


def _pad_width(v_JKD: Tensor, q_THD: Tensor) -> Tensor:
    """Values padded with zeros to the width of queries: flash attention has one width for all."""
    missing = q_THD.shape[-1] - v_JKD.shape[-1]
    return F.pad(v_JKD, (0, missing)) if missing else v_JKD
