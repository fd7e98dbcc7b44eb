"""Tensors of Hugging Face to a rank's part of a parameter of Megatron-core, and all parts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.training.megatron.hf_mapping.mapping import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which of equal parts a rank holds."""

    index: int = 0
    count: int = 1

    def of(self, length: int) -> slice:
        """Its places on an axis."""
        assert length % self.count == 0, f"{length} rows or columns are not cut into {self.count} parts"
        step = length // self.count
        return slice(self.index * step, (self.index + 1) * step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of a model, what layouts depend on."""

    num_groups: int  # of heads that share a key head
    heads_of_group: int  # query heads
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A tensor of Hugging Face of which any slice can be had, without the rest where it lies in a file."""

    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]
    columns: Callable[[slice], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """One that is in memory."""
        return cls(shape=tuple(tensor.shape), rows=lambda some: tensor[some], columns=lambda some: tensor[:, some])


def take(layout: Layout, sources: Sequence[Source], *, part: Part, figures: Figures) -> Tensor:
    """A rank's part of a parameter; of the sources only what belongs to it is read."""
    (first, *_), count = sources, len(sources)
    assert count == {Layout.qkv: 3, Layout.gated: 2}.get(layout, 1), f"{count} tensors are not laid out as {layout}"
    if layout == Layout.whole:
        return first.rows(slice(None))
    if layout == Layout.rows:
        return first.rows(part.of(first.shape[0]))
    if layout == Layout.columns:
        return first.columns(part.of(first.shape[1]))
    if layout == Layout.vocabulary:
        return _padded_rows(first, part.of(figures.padded_vocab_size))
    if layout == Layout.qkv and part.count > figures.num_groups:
        # Several ranks share a group: each has some of its rows, whichever heads they are of.
        number = part.count // figures.num_groups
        group = Part(index=part.index // number, count=figures.num_groups)
        whole = torch.cat([each.rows(group.of(each.shape[0])) for each in sources])
        return whole[Part(index=part.index % number, count=number).of(len(whole))]
    if layout == Layout.qkv:
        num_groups = figures.num_groups // part.count
        shares = [_in_groups(each.rows(part.of(each.shape[0])), num_groups) for each in sources]
        return torch.cat(shares, dim=1).flatten(0, 1)
    if layout == Layout.gated:
        return torch.cat([each.rows(part.of(each.shape[0])) for each in sources])
    half = first.shape[0] // 2
    some = part.of(half)
    return torch.cat([first.rows(slice(start + some.start, start + some.stop)) for start in (0, half)])


def give(layout: Layout, parts: Sequence[Tensor], *, figures: Figures) -> list[Tensor]:
    """The inverse of `take`, from the parts of all ranks in their order."""
    if layout == Layout.whole:
        return [parts[0]]
    if layout == Layout.columns:
        return [_joined(parts, dim=1)]
    if layout == Layout.rows:
        return [_joined(parts)]
    if layout == Layout.vocabulary:
        return [_joined(parts)[: figures.vocab_size]]
    if layout == Layout.qkv:
        groups = _in_groups(_joined(parts), figures.num_groups)
        width = groups.shape[1] // (figures.heads_of_group + 2)
        return [
            each.flatten(0, 1) for each in torch.split(groups, [figures.heads_of_group * width, width, width], dim=1)
        ]
    halves = [part.chunk(2) for part in parts]
    gate, other = (_joined([half[i] for half in halves]) for i in range(2))
    return [gate, other] if layout == Layout.gated else [torch.cat((gate, other))]


def _in_groups(rows: Tensor, number: int) -> Tensor:
    return rows.reshape(number, len(rows) // number, *rows.shape[1:])


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _padded_rows(source: Source, some: slice) -> Tensor:
    """Some rows; those behind the last one are zeros."""
    rows = source.rows(slice(min(some.start, source.shape[0]), min(some.stop, source.shape[0])))
    missing = some.stop - some.start - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
