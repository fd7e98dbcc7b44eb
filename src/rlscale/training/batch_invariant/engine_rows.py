"""Which rows of a packed micro-batch the engine computed together, and in which shapes.

The engine has a prompt in one go, padded, beside others of its length; every further token with one token each of other
sequences, over a cache of fixed length. What the others are changes nothing, how many they are does.

Shape legend: T packed tokens, R trainable tokens, P prompts of a block, L padded length, B rows of a lane, S its cached
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlscale.models.batch_shapes import EngineShapes, fixed_rows, padded_len
from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Rows that go through a product with a weight `size` at a time, the last ones beside rows of zeros."""

    size: int
    rows: Tensor  # [n]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBlock:
    """Prompts that attend together. `rows` names packed rows, T where there is padding."""

    rows: Tensor  # [P, L]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneBlock:
    """Tokens that attend together, each to its sample from the first row up to its own. T stands for no row."""

    rows: Tensor  # [B]
    starts: Tensor  # [B] first row of the sample
    length: int  # S


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRows:
    """How the engine computed a micro-batch."""

    layers: tuple[Blocks, ...]  # of the T rows
    head: tuple[Blocks, ...]  # of the R rows of logits
    prompts: tuple[PromptBlock, ...]
    lanes: tuple[LaneBlock, ...]
    num_positions: int  # of the longest sample


def engine_rows(
    lengths_S: Int64, prompt_lens_S: Int64, *, logit_rows_R: Int64, shapes: EngineShapes, device: torch.device
) -> EngineRows:
    """The shapes of samples that lie end to end.

    Args:
        lengths_S: tokens of each sample.
        prompt_lens_S: of them in the prompt.
        logit_rows_R: packed rows whose logits are wanted.
        shapes: figures of the engine.
        device: of the micro-batch.
    """
    starts_S = np.cumsum(lengths_S) - lengths_S
    num_rows = int(lengths_S.sum())
    in_layers, in_head = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    prompts: dict[int, list[Int64]] = {}
    lanes: dict[tuple[int, int], list[Int64]] = {}
    for start, length, prompt_len in zip(starts_S.tolist(), lengths_S.tolist(), prompt_lens_S.tolist(), strict=True):
        padded, lane = padded_len(prompt_len), shapes.decode_shape(prompt_len)
        rows = np.arange(start, start + length)
        in_layers[rows[:prompt_len]], in_head[rows[:prompt_len]] = fixed_rows(padded) * padded, fixed_rows(padded)
        in_layers[rows[prompt_len:]] = in_head[rows[prompt_len:]] = lane[1]
        prompts.setdefault(padded, []).append(rows[:prompt_len])
        lanes.setdefault(lane, []).append(np.stack([rows[prompt_len:], np.full(length - prompt_len, start)]))
    return EngineRows(
        layers=_blocks(in_layers, device),
        head=_blocks(in_head[logit_rows_R], device),
        prompts=tuple(
            PromptBlock(rows=_table(some, (fixed_rows(padded), padded), fill=num_rows, device=device))
            for padded, found in sorted(prompts.items())
            for some in _parts(found, fixed_rows(padded))
        ),
        lanes=tuple(
            block
            for (cache_len, num_slots), found in sorted(lanes.items())
            for block in _lane_blocks(np.concatenate(found, axis=1), cache_len, num_slots, fill=num_rows, device=device)
        ),
        num_positions=int(lengths_S.max()),
    )


def _blocks(sizes: Int64, device: torch.device) -> tuple[Blocks, ...]:
    return tuple(
        Blocks(size=int(size), rows=torch.from_numpy(np.flatnonzero(sizes == size)).to(device))
        for size in np.unique(sizes)
    )


def _parts(items: Sequence[Int64], size: int) -> list[Sequence[Int64]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _table(lists: Sequence[Int64], shape: tuple[int, int], *, fill: int, device: torch.device) -> Tensor:
    table = np.full(shape, fill, dtype=np.int64)
    for i, items in enumerate(lists):
        table[i, : len(items)] = items
    return torch.from_numpy(table).to(device)


def _lane_blocks(tokens: Int64, length: int, num_slots: int, *, fill: int, device: torch.device) -> Iterator[LaneBlock]:
    """Blocks of [2, n] rows and first rows."""
    for start in range(0, tokens.shape[1], num_slots):
        some = np.full((2, num_slots), fill, dtype=np.int64)
        part = tokens[:, start : start + num_slots]
        some[:, : part.shape[1]] = part
        rows, starts = torch.from_numpy(some).to(device)
        yield LaneBlock(rows=rows, starts=starts, length=length)
