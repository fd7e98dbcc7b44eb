"""Common prefixes of samples: the order in which a tree of their tokens is walked depth first.

    A B C D        order: the samples sorted by their tokens         A B ─┬─ C ─┬─ D
    A B C E  ───>  shared: tokens in common with the one before ───>      │     └─ E
    A B F            0, 3, 2                                              └─ F

Shape legend: T tokens of all samples, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlscale.expert_routes import RouteIds
from rlscale.types import Int32, Int64

MIN_SHARED_TOKENS = 64
"""Samples of different prompts share a prefix from this length on: a short one saves less than it costs."""


_MULTIPLIER = np.uint64(6364136223846793005)  # odd, with bits in all places: Knuth's for such generators


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTree:
    """Samples in the order of their tokens. Made by `build_prefix_tree`.

    Invariant: of samples i < k in this order, the first min(shared[i + 1 : k + 1]) tokens are equal.
    """

    order: Int64  # [S] indices into the samples given
    shared: Int64  # [S] leading tokens of each, in this order, that the one before it has, too

    def has_shared(self) -> bool:
        """Whether any two samples share a token."""
        return bool(self.shared.any())


def build_prefix_tree(tokens_T: Int32 | Int64, starts_S: Int64, lengths_S: Int64, prompt_lens_S: Int64) -> PrefixTree:
    """Builds the tree of samples from their tokens alone; equal samples keep their order.

    Args:
        tokens_T: of all samples.
        starts_S: index of the first token of each.
        lengths_S: tokens of each, at least 1.
        prompt_lens_S: two samples share at least a whole prompt or `MIN_SHARED_TOKENS`, or nothing.
    """
    pieces = [
        tokens_T[start : start + length] for start, length in zip(starts_S.tolist(), lengths_S.tolist(), strict=True)
    ]
    # Any total order of tokens keeps equal prefixes together, that of their bytes too: it is that of `memcmp`.
    keys = [piece.tobytes() for piece in pieces]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared, enough = np.zeros(len(order), dtype=np.int64), np.minimum(prompt_lens_S, MIN_SHARED_TOKENS).tolist()
    for place in range(1, len(order)):
        before, own = order[place - 1], order[place]
        length = _common_length(pieces[before], pieces[own])
        if length >= min(enough[before], enough[own]):
            shared[place] = length
    return PrefixTree(order=np.asarray(order, dtype=np.int64), shared=shared)


def mix_routes(tokens_T: Int32 | Int64, routes: RouteIds) -> Int64:
    """Numbers that are equal where tokens and their expert routes are: others must not share a prefix. [T]

    Args:
        tokens_T: or other keys.
        routes: of the engine, [T, layers, chosen].
    """
    keys = tokens_T.astype(np.uint64)
    # A polynomial modulo 2^64; two of them collide with a probability of about 2^-64.
    for column in routes.reshape(len(routes), -1).T:
        keys = keys * _MULTIPLIER + column
    return keys.view(np.int64)


def _common_length(first: Int32 | Int64, second: Int32 | Int64) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax())
    return place if differs[place] else length
