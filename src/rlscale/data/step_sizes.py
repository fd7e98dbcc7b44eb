"""Tokens and work of sets of samples, in which a prefix that several of them share counts once.

    prompt ─┬─ answer 0        tokens of {0}: 5 + 3        a micro-batch of all three has 5 + 3 + 4 + 2 tokens, and two
     (5)    ├─ answer 1        tokens of {0, 1}: 5 + 3 + 4    of one answer each have 5 + 3 and 5 + 4
            └─ answer 2

Shape legend: S samples of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rlscale.architectures.architecture import ForwardCost
from rlscale.data.bin_packing import first_fit_decreasing, karmarkar_karp
from rlscale.data.load_balance import assign_to_ranks, sample_work
from rlscale.data.prefix_tree import PrefixTree
from rlscale.types import Int64

_MAX_CUTS = 6
"""Limits of the tokens of a part that are tried for the balance of the ranks, each half of the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Samples with a common prefix, and the tokens of their tree from its root on."""

    samples: list[int]
    tokens: int


@dataclass(kw_only=True, slots=True)
class _Node:
    """A prefix of some tokens, and the parts that begin with it."""

    depth: int
    parts: list[_Part] = field(default_factory=list)


class StepSizes:
    """Sizes of the samples of a step, which are numbered from 0.

    Args:
        lengths_S: tokens of each.
        trainable_S: trainable tokens of each.
        cost: of the model; None: their work is not balanced.
        tree: of their common prefixes; None: every sample is computed separately.

    Example:
        sizes = StepSizes(lengths, trainable, cost=None, tree=tree)
        micros = sizes.pack(range(len(lengths)), capacity=16384)
        assert all(sizes.tokens(micro) <= 16384 for micro in micros)
    """

    def __init__(
        self, lengths_S: Int64, trainable_S: Int64, *, cost: ForwardCost | None, tree: PrefixTree | None
    ) -> None:
        self.lengths: list[int] = lengths_S.tolist()
        self.work: list[int] | None = None if cost is None else sample_work(lengths_S, trainable_S, cost).tolist()
        self._cost, self._shared, self._places = cost, list[int](), list[int]()
        if tree is not None and tree.has_shared():
            self._shared = tree.shared.tolist()
            self._places = np.argsort(tree.order).tolist()

    @property
    def has_trees(self) -> bool:
        """Whether any samples of the step share a prefix."""
        return bool(self._shared)

    def tokens(self, samples: Sequence[int]) -> int:
        """Tokens that a micro-batch of these samples computes."""
        total = sum(map(self.lengths.__getitem__, samples))
        return total - sum(self._common(samples)[1]) if self._shared else total

    def costs(self, samples: Sequence[int]) -> int:
        """FLOPs of a micro-batch of these samples, up to a factor."""
        assert self.work is not None and self._cost is not None, "batch.balance_data needs the cost of the model"
        total = sum(map(self.work.__getitem__, samples))
        if not self._shared:
            return total
        # A sample adds the work that its own tokens have with all tokens before them.
        common = np.asarray(self._common(samples)[1], dtype=np.int64)
        return total - int(sample_work(common, np.zeros_like(common), self._cost).sum())

    def pack(self, samples: Sequence[int], *, capacity: int) -> list[list[int]]:
        """Packs samples into micro-batches of at most `capacity` tokens; a longer one only has its own prefixes.

        Trees that fit stay whole. A tree that does not is packed branch by branch, first fit decreasing, each
        micro-batch with the prefix; so are the trees, and the samples of a step without any.
        """
        if not self._shared:
            bins = first_fit_decreasing([self.lengths[i] for i in samples], capacity=capacity)
            return [[samples[i] for i in each] for each in bins]
        return [part.samples for part in self._parts(samples, limit=capacity, merges=True)]

    def halves(self, samples: Sequence[int]) -> list[list[int]]:
        """Splits a micro-batch in two of about equal tokens; samples with a common prefix stay neighbours."""
        order, common = self._common(samples) if self._shared else (list(samples), [0] * len(samples))
        if not any(common):
            parts = karmarkar_karp([self.lengths[i] for i in samples], num_bins=2)
            return [[samples[i] for i in part] for part in parts]
        added = np.asarray([self.lengths[i] for i in order]) - common
        # Cut before sample i: the second half computes what it has in common with the first one again.
        first = np.cumsum(added)[:-1]
        second = added.sum() - first + np.asarray(common[1:])
        cut = int(np.argmin(np.maximum(first, second))) + 1
        return [order[:cut], order[cut:]]

    def assign(self, *, num_ranks: int) -> list[list[int]]:
        """Assigns all samples to ranks by tokens and FLOPs, so that trees stay together where the ranks stay balanced.

        Trees are assigned as a whole, and again with parts of at most half the tokens, and so on: the best maximum of
        a rank wins, the largest parts first.
        """
        assert self.work is not None, "batch.balance_data needs the cost of the model"
        if not self._shared:
            return assign_to_ranks(self.lengths, self.work, num_ranks=num_ranks)
        everything = list(range(len(self.lengths)))
        limit, best, best_cost = self.tokens(everything), [everything], -1
        if num_ranks == 1:
            return best
        for _ in range(_MAX_CUTS):
            parts = self._parts(everything, limit=limit, merges=False)
            shares = assign_to_ranks(
                [part.tokens for part in parts], [self.costs(part.samples) for part in parts], num_ranks=num_ranks
            )
            ranks = [[i for part in share for i in parts[part].samples] for share in shares]
            cost = max(map(self.costs, ranks))
            if best_cost < 0 or cost < best_cost:
                best, best_cost = ranks, cost
            limit //= 2
        return best

    def _common(self, samples: Sequence[int]) -> tuple[list[int], list[int]]:
        """The samples depth first, and the tokens that each has in common with the one before it."""
        places = self._places
        order = sorted(samples, key=places.__getitem__)
        shared = self._shared
        between = (min(shared[places[a] + 1 : places[b] + 1]) for a, b in pairwise(order))
        return order, [0, *between] if order else []

    def _parts(self, samples: Sequence[int], *, limit: int, merges: bool) -> list[_Part]:
        """Parts of trees of at most `limit` tokens, from the leaves up. `merges`: of several trees, too."""
        order, common = self._common(samples)
        nodes, pending = [_Node(depth=0)], list[_Part]()
        for sample, depth in zip([*order, -1], [*common, 0], strict=True):
            # Closes the nodes that the sample does not begin with.
            while nodes[-1].depth > depth:
                node = nodes.pop()
                node.parts += pending
                pending = _joined(node, limit=limit, merges=merges)
            if pending and nodes[-1].depth < depth:
                nodes.append(_Node(depth=depth))
            nodes[-1].parts += pending
            pending = [_Part(samples=[sample], tokens=self.lengths[sample])] if sample >= 0 else []
        return _joined(nodes[0], limit=limit, merges=merges) if merges else nodes[0].parts


def _joined(node: _Node, *, limit: int, merges: bool) -> list[_Part]:
    """The parts of a node as one, or, if that is larger than `limit`, as several."""
    parts, depth = node.parts, node.depth
    whole = depth + sum(part.tokens - depth for part in parts)
    if whole <= limit:
        groups = [list(range(len(parts)))] if parts else []
    elif merges and depth < limit:
        groups = first_fit_decreasing([part.tokens - depth for part in parts], capacity=limit - depth)
    else:
        return parts
    return [
        _Part(
            samples=[sample for i in group for sample in parts[i].samples],
            tokens=depth + sum(parts[i].tokens - depth for i in group),
        )
        for group in groups
    ]
