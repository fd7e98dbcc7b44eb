"""Sums along the trainable tokens of each response.

Shape legend beyond `ragged.py`: N trainable tokens, sample after sample and in order within each; K chunks; C columns
of a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout, check_shape, check_vectors, zero_masked

CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainableTokens:
    """The trainable tokens of a layout as one dense row, in which the neighbour of a token is the next trainable one.

    The layout lists the tokens of one sample in the order of time; samples may be interleaved.

    Example:
        tokens = TrainableTokens.from_layout(layout)
        tokens.next_values(values_T[tokens.rows_N])  # the value at the next trainable token
    """

    rows_N: Tensor  # index of each in the layout
    counts_S: Tensor  # number in each sample

    @classmethod
    def from_layout(cls, layout: TokenLayout) -> "TrainableTokens":
        rows_N = layout.mask_T.nonzero().squeeze(1)
        ids_N = layout.sample_ids_T[rows_N]
        counts_S = torch.bincount(ids_N, minlength=layout.num_samples)
        # Interleaved samples: a stable sort by sample keeps the order of time within each.
        if (ids_N[1:] < ids_N[:-1]).any():
            rows_N = rows_N[torch.argsort(ids_N, stable=True)]
        return cls(rows_N=rows_N, counts_S=counts_S)

    def next_values(self, values_N: Tensor) -> Tensor:
        """The value of the next token of the same sample, 0 after its last. [N]"""
        shifted_N = torch.zeros_like(values_N)
        shifted_N[:-1] = values_N[1:]
        shifted_N[self.last_per_sample()[1]] = 0
        return shifted_N

    def last_per_sample(self) -> tuple[Tensor, Tensor]:
        """The samples that have a trainable token, and the index of the last one of each in the row. [S'], [S']"""
        has_tokens_S = self.counts_S > 0
        return has_tokens_S.nonzero().squeeze(1), self.counts_S.cumsum(0)[has_tokens_S] - 1


def discounted_sums(values_T: Tensor, *, layout: TokenLayout, decay: float | Tensor) -> Tensor:
    """y_t = x_t + decay * y_next, with `next` the next trainable token of the same sample and y = 0 after the last.

    Equal to the serial recursion up to rounding, in about log(T) steps: a chunk is one product with a triangular matrix
    of powers, and the carries between chunks follow the same recursion with decay^C. slime: `chunked_gae`,
    `chunked_discounted_returns`.

    Args:
        values_T: x. Values where a token is not trainable are not read. [T]
        layout: samples and trainable tokens.
        decay: within [0, 1], the same for all samples, or one of each sample. [S]

    Returns:
        y, 0 where not trainable. [T]
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    _check_decay(decay, layout=layout)
    tokens = TrainableTokens.from_layout(layout)
    sums_T = torch.zeros_like(values_T)
    sums_T[tokens.rows_N] = _suffix_sums(values_T[tokens.rows_N], lengths_S=tokens.counts_S, decay=decay)
    return zero_masked(sums_T, mask_T=layout.mask_T)


def _check_decay(decay: float | Tensor, *, layout: TokenLayout) -> None:
    if isinstance(decay, Tensor):
        check_shape("decay", decay, (layout.num_samples,))
        within = bool(((decay >= 0) & (decay <= 1)).all())
    else:
        within = 0 <= decay <= 1
    if not within:
        raise ValueError(f"decay must be within [0, 1], got {decay}")


def _suffix_sums(values_N: Tensor, *, lengths_S: Tensor, decay: float | Tensor) -> Tensor:
    """The recursion over packed runs of `lengths_S` values. [N]"""
    if not len(values_N):
        return values_N
    chunks_S = (lengths_S + CHUNK - 1) // CHUNK
    num_chunks = int(chunks_S.sum())
    # Every sample starts a new chunk, so that no chunk holds two: shift_S is the padding before each sample.
    shift_S = CHUNK * (chunks_S.cumsum(0) - chunks_S) - (lengths_S.cumsum(0) - lengths_S)
    places_N = torch.arange(len(values_N), device=values_N.device) + torch.repeat_interleave(shift_S, lengths_S)
    padded = torch.zeros(num_chunks * CHUNK, dtype=values_N.dtype, device=values_N.device)
    padded[places_N] = values_N
    chunks_KC = padded.view(num_chunks, CHUNK)
    decay_K1: float | Tensor = decay
    if isinstance(decay, Tensor):
        decay_K1 = torch.repeat_interleave(decay.to(values_N.dtype), chunks_S)[:, None]
        sums_KC = _scan(chunks_KC, decay_K1=decay_K1)
    else:
        sums_KC = chunks_KC @ _powers(decay, like=values_N)
    # Samples of more than one chunk: the first sum of each chunk is the carry into the chunk before it.
    if num_chunks > int((chunks_S > 0).sum()):
        first_K = _suffix_sums(sums_KC[:, 0], lengths_S=chunks_S, decay=decay**CHUNK)
        ends_K = torch.zeros_like(first_K)
        ends_K[:-1] = first_K[1:]
        # The last chunk of a sample has no successor.
        ends_K[(chunks_S.cumsum(0) - 1)[chunks_S > 0]] = 0
        distances_C = torch.arange(CHUNK, 0, -1, dtype=values_N.dtype, device=values_N.device)
        sums_KC = sums_KC + ends_K[:, None] * decay_K1**distances_C
    return sums_KC.reshape(-1)[places_N]


def _scan(values_KC: Tensor, *, decay_K1: Tensor) -> Tensor:
    """The recursion within each chunk, with a decay per chunk. [K, C]

    After the pass of distance d an entry is the sum of 2d terms, so log2(C) passes are enough; no matrix per chunk.
    """
    distance = 1
    while distance < CHUNK:
        moved_KC = torch.zeros_like(values_KC)
        moved_KC[:, :-distance] = values_KC[:, distance:]
        values_KC = values_KC + decay_K1**distance * moved_KC
        distance *= 2
    return values_KC


def _powers(decay: float, *, like: Tensor) -> Tensor:
    """decay^(row - column) on and below the diagonal, 0 above it. [C, C]"""
    places_C = torch.arange(CHUNK, dtype=like.dtype, device=like.device)
    distances_CC = places_C[:, None] - places_C[None, :]
    return torch.where(distances_CC >= 0, decay ** distances_CC.clamp(min=0), torch.zeros_like(distances_CC))
