"""Queries and keys of samples whose common prefixes are packed once, for the kernel of a GPU.

Each row is a query once. The keys of a sample are its whole path, so that those of a prefix are read by each sample.

Shape legend: E rows of the samples end to end, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlscale.training.attention.varlen_kernel import SampleEnds
from rlscale.training.packing.prefix_sharing import SharedRows, TreeRows, find_shared_rows
from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanKeys:
    """Rows of each sample that are its own, as queries, and its whole path, as keys, for the kernel of a GPU."""

    shared: SharedRows  # keys [E], in packed order of the samples
    ends: SampleEnds


def build_span_keys(rows: TreeRows, lengths_S: Int64, *, device: torch.device) -> SpanKeys:
    """Builds the queries and keys of samples end to end, of these lengths."""
    starts = np.cumsum(lengths_S) - lengths_S
    # Packed order is that of the samples' own rows, of which equal samples have none.
    packed = np.full(len(lengths_S), -1)
    row_of = np.empty(len(rows.originals), dtype=np.int64)
    row_of[rows.pick] = np.arange(len(rows.pick))
    has_rows = lengths_S > rows.own_starts
    packed[has_rows] = row_of[(starts + rows.own_starts)[has_rows]]
    order = [sample for sample in np.argsort(packed).tolist() if packed[sample] >= 0]
    # Keys end to end: the path of each sample, as packed rows; the first of equal rows stands for all.
    keys = np.concatenate([row_of[rows.originals[starts[i] : starts[i] + lengths_S[i]]] for i in order])
    _, first = np.unique(keys, return_index=True)
    queries, paths = ends_of((lengths_S - rows.own_starts)[order]), ends_of(lengths_S[order])
    return SpanKeys(
        shared=find_shared_rows(first[keys], pick_T=first, device=device),
        ends=SampleEnds(
            queries=to_int32(queries, device),
            keys=to_int32(paths, device),
            max_queries=int(np.diff(queries).max()),
            max_keys=int(lengths_S.max()),
        ),
    )


def ends_of(lengths: Int64) -> Int64:
    """0, then the end of each run of these lengths."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def to_int32(array: Int64, device: torch.device) -> Tensor:
    """The array as a tensor of 32 bits, which the kernel of a GPU expects."""
    return torch.from_numpy(array.astype(np.int32)).to(device)
