"""Batch shapes in which the engine computed the rows of a packed micro-batch.

The engine computes a prompt in one pass, padded, in a batch with others of its length. It computes every further token
in a decode batch with one token of other sequences, over a cache of fixed length. The content of the other rows does
not change a row's bits; their number does.

Shape legend: T packed tokens, R trainable tokens, P prompts of a block, L padded length, B rows of a decode batch, S
its cached positions.
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
    """Rows that are multiplied with a weight `size` at a time; the last block is padded with rows of zeros."""

    size: int
    rows: Tensor  # [n]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBlock:
    """Prompts that are computed in one batch. `rows` are packed rows, T for padding."""

    rows: Tensor  # [P, L]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBlock:
    """Tokens of one decode batch. Each attends to the rows of its sample up to its own. T stands for no row."""

    rows: Tensor  # [B]
    starts: Tensor  # [B] first row of the sample
    length: int  # S


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRows:
    """Batches of the engine in which a micro-batch was computed."""

    layers: tuple[Blocks, ...]  # of the T rows
    head: tuple[Blocks, ...]  # of the R rows of logits
    prompts: tuple[PromptBlock, ...]
    decodes: tuple[DecodeBlock, ...]
    num_positions: int  # of the longest sample


def engine_rows(
    lengths_S: Int64, prompt_lens_S: Int64, *, logit_rows_R: Int64, shapes: EngineShapes, device: torch.device
) -> EngineRows:
    """Computes the batch shapes of samples end to end.

    Args:
        lengths_S: tokens of each sample.
        prompt_lens_S: tokens of each prompt.
        logit_rows_R: packed rows whose logits are computed.
        shapes: sizes of the engine's batches.
        device: of the micro-batch.
    """
    starts_S = np.cumsum(lengths_S) - lengths_S
    num_rows = int(lengths_S.sum())
    in_layers, in_head = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    prompts: dict[int, list[Int64]] = {}  # by padded length
    decodes: dict[tuple[int, int], list[Int64]] = {}  # by cache length and number of slots
    for start, length, prompt_len in zip(starts_S.tolist(), lengths_S.tolist(), prompt_lens_S.tolist(), strict=True):
        padded, shape = padded_len(prompt_len), shapes.decode_shape(prompt_len)
        rows = np.arange(start, start + length)
        # Layers see all tokens of a batch of prompts; the output layer sees one row, the last one, of each prompt.
        in_layers[rows[:prompt_len]], in_head[rows[:prompt_len]] = fixed_rows(padded) * padded, fixed_rows(padded)
        in_layers[rows[prompt_len:]] = in_head[rows[prompt_len:]] = shape[1]
        prompts.setdefault(padded, []).append(rows[:prompt_len])
        decodes.setdefault(shape, []).append(np.stack([rows[prompt_len:], np.full(length - prompt_len, start)]))
    return EngineRows(
        layers=_blocks(in_layers, device),
        head=_blocks(in_head[logit_rows_R], device),
        prompts=tuple(
            PromptBlock(rows=_table(some, (fixed_rows(padded), padded), fill=num_rows, device=device))
            for padded, found in sorted(prompts.items())
            for some in _parts(found, fixed_rows(padded))
        ),
        decodes=tuple(
            block
            for (cache_len, num_slots), found in sorted(decodes.items())
            for block in _decode_blocks(
                np.concatenate(found, axis=1), cache_len, num_slots, fill=num_rows, device=device
            )
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


def _decode_blocks(
    tokens: Int64, length: int, num_slots: int, *, fill: int, device: torch.device
) -> Iterator[DecodeBlock]:
    """Yields blocks of `num_slots` tokens from [2, n]: their rows, and the first rows of their samples."""
    for start in range(0, tokens.shape[1], num_slots):
        some = np.full((2, num_slots), fill, dtype=np.int64)
        part = tokens[:, start : start + num_slots]
        some[:, : part.shape[1]] = part
        rows, starts = torch.from_numpy(some).to(device)
        yield DecodeBlock(rows=rows, starts=starts, length=length)
